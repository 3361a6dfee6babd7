"""DeepSpeed's longer import paths for names of this package, and names that it does not support."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from types import ModuleType

from megatron.compatibility.import_hook import stand_in
from megatron_lattice.deepspeed import (
    checkpointing,
    engine,
    flops,
    lr_schedules,
    monitors,
    ops,
    settings,
    utils,
    zero,
)

_PACKAGE = "megatron_lattice.deepspeed"
_PIPE = "models that are split into stages: pretrain_gpt.py --pipeline-model-parallel-size"
_MOE = "models with experts: pretrain_gpt.py --num-experts"
_TEXT = "text from a model: tools/generate.py"

_CONFIG = {"DeepSpeedConfig": settings.DeepSpeedConfig}
_LOGS = {"log_dist": utils.log_dist, "logger": utils.logger}
_RECOMPUTE = {name: getattr(checkpointing, name) for name in checkpointing.__all__}
_ZERO = {"GatheredParameters": zero.GatheredParameters, "Init": zero.Init}

PATHS: Mapping[str, Mapping[str, object]] = {
    "": {**_CONFIG, **_LOGS},
    "monitor.monitor": {"MonitorMaster": monitors.MonitorMaster},
    "ops.adam": {"DeepSpeedCPUAdam": ops.DeepSpeedCPUAdam, "FusedAdam": ops.FusedAdam},
    "ops.lion": {"FusedLion": ops.FusedLion},
    "profiling.flops_profiler": {"get_model_profile": flops.get_model_profile},
    "runtime.activation_checkpointing.checkpointing": _RECOMPUTE,
    "runtime.config": _CONFIG,
    "runtime.engine": {"DeepSpeedEngine": engine.DeepSpeedEngine},
    "runtime.lr_schedules": {name: getattr(lr_schedules, name) for name in lr_schedules.BY_NAME},
    "runtime.zero": _ZERO,
    "runtime.zero.partition_parameters": _ZERO,
    "utils.logging": _LOGS,
}
"""Module below the package -> its names and their values."""

LACKING: Mapping[str, Mapping[str, str]] = {
    "": {
        "InferenceEngine": _TEXT,
        "OnDevice": "a model is built on the CPU; initialize() moves and shards it",
        "PipelineEngine": _PIPE,
        "PipelineModule": _PIPE,
        "init_inference": _TEXT,
        "tp_model_init": "pretrain_gpt.py --tensor-model-parallel-size",
    },
    "checkpoint": {"DeepSpeedCheckpoint": "python tools/checkpoint inspect reads any checkpoint"},
    "moe": {"MoE": _MOE},
    "moe.layer": {"MoE": _MOE},
    "pipe": {"LayerSpec": _PIPE, "PipelineModule": _PIPE, "TiedLayerSpec": _PIPE},
}
"""Module -> names that can be imported; a call raises an error with the alternative."""


def install() -> None:
    """Create the modules of both tables and fill them."""
    for path, names in PATHS.items():
        vars(_module(path)).update(names)
    for path, reasons in LACKING.items():
        module = _module(path)
        for name, reason in reasons.items():
            setattr(module, name, stand_in(module.__name__, name, reason))


def _module(path: str) -> ModuleType:
    """Return a module below the package; create it and its parents if they do not exist."""
    name = f"{_PACKAGE}.{path}" if path else _PACKAGE
    if name not in sys.modules:
        parent, _, last = path.rpartition(".")
        sys.modules[name] = ModuleType(name, "Names of DeepSpeed.")
        setattr(_module(parent), last, sys.modules[name])
    return sys.modules[name]
