"""What there is to measure on the day a GPU is there: `make gpu`."""
