"""Signals sent to real runs, and what must be left of them: `python -m tests.faults`."""
