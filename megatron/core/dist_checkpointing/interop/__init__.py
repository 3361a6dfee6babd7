"""Checkpoints of other programs, read as data: nothing in them is imported or called."""
