"""Lattice: a model-parallel transformer pretraining framework."""
