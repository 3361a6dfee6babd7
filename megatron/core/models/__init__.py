"""Models built from transformer blocks."""
