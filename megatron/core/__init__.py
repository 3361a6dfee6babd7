"""Model-parallel training of transformers: topology, layers, schedules, checkpoints, optimizers.

A name is imported at its first use: importing one part does not import the others.
"""

from __future__ import annotations

import importlib
from typing import Any

_MODULE_OF = {
    "DistributedDataParallel": "distributed:DistributedDataParallel",
    "InferenceParams": "inference_params:InferenceParams",
    "ModelParallelConfig": "model_parallel_config:ModelParallelConfig",
    "Timers": "timers:Timers",
    "mpu": "parallel_state",
    "dist_checkpointing": "dist_checkpointing",
    "num_microbatches_calculator": "num_microbatches_calculator",
    "parallel_state": "parallel_state",
    "tensor_parallel": "tensor_parallel",
}
"""Public name -> module of this package, and the name there."""

__all__ = ["__version__", *_MODULE_OF]


def __getattr__(name: str) -> Any:
    if name in _MODULE_OF:
        module, _, attribute = _MODULE_OF[name].partition(":")
        found = importlib.import_module(f"{__name__}.{module}")
        return getattr(found, attribute) if attribute else found
    if name in ("__version__", "__package_name__", "__shortversion__"):
        return getattr(importlib.import_module("megatron.core.package_info"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
