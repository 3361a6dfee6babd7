"""Parameters: their metadata, initial values, and random numbers keyed by what they are for."""
