"""Benchmarks; each is run with `python -m benchmarks.<name>`."""
