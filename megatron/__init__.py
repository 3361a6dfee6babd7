"""Lattice: a model-parallel transformer pretraining framework."""

from megatron.compatibility.lookup import install as _install_names

_install_names()
