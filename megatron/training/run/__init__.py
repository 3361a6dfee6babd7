"""A training run: the loop, one step, evaluation, and the state that a checkpoint brings back."""
