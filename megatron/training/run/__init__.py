"""The training loop, a step, evaluation, and the counters of a run."""
