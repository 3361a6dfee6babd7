"""Elementwise chains of a layer as single autograd functions that keep and allocate little."""
