"""Hybrid models."""
