"""Backends made of GPU libraries: they implement the `Backend` protocol of the blocks."""
