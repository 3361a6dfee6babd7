"""Sequence mixers with a state of fixed size, which take the place of attention in a layer."""
