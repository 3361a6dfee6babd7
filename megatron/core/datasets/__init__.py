"""Corpora on disk, the sample order made from them, and blends of several.

It imports nothing on purpose: `indexed_dataset` and the preprocessing tools must start in a
fraction of a second and never load torch.
"""
