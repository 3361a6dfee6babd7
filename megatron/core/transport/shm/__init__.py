"""Shared memory of ranks on one machine: what they use in place of the loopback network."""
