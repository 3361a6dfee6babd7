"""Compute-only orders of pipeline steps, one module per schedule."""
