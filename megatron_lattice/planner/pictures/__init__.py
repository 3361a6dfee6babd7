"""Pictures of predictions: memory, a step on a clock, operators, a search, scaling."""
