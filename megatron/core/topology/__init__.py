"""The positions of ranks in the grid of parallel axes."""
