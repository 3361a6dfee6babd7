"""A training step of one rank of any run on an accelerator that computes shapes."""
