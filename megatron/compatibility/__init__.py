"""Megatron's names for what is called, placed or built otherwise here.

`elsewhere` says where a name of Megatron is defined in this framework, `lacking` gives the reason
why a feature is not here, and `lookup` lets imports find both. Modules beside them hold the small
functions that exist for such code alone. Nothing in the framework itself uses this package.
"""
