"""Means to verify code for GPUs on machines that have none."""
