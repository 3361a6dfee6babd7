"""Corpora on disk, the sample order made from them, and blends of several.

Kept empty of imports on purpose: `indexed_dataset` and the preprocessing tools must start in a
fraction of a second and never load torch.
"""
