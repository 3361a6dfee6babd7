"""Predict what a training step costs, and choose layouts, before anything runs."""
