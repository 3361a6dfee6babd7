"""Predict the cost of a training step, and choose layouts, before a run starts."""
