"""Kernels: what computes an operation of a layer, and the tables by which one is chosen."""
