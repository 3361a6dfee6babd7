"""Compression of gradients between ranks: wire formats and low rank."""
