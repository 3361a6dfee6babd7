"""Which rank stands where in the grid of parallel axes."""
