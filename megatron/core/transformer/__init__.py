"""The blocks of a transformer. A name is imported at its first use."""

from __future__ import annotations

import importlib
from typing import Any

_MODULE_OF = {
    "MLATransformerConfig": "transformer_config",
    "MegatronModule": "module",
    "ModuleSpec": "spec_utils",
    "TransformerConfig": "transformer_config",
    "TransformerLayer": "transformer_layer",
    "TransformerLayerSubmodules": "transformer_layer",
    "build_module": "spec_utils",
}
"""Public name -> module of this package that defines it."""

__all__ = list(_MODULE_OF)


def __getattr__(name: str) -> Any:
    if name in _MODULE_OF:
        return getattr(importlib.import_module(f"{__name__}.{_MODULE_OF[name]}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
