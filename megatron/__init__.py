"""Lattice: a model-parallel transformer pretraining framework."""

from megatron.compatibility.import_hook import install as _install_names

_install_names()
