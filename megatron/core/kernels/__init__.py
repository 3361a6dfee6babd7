"""Kernels that compute the operations of layers, and the tables that choose between them."""
