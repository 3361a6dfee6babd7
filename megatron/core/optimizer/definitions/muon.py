"""Muon; its arithmetic is in `optimizer/muon.py`."""

from __future__ import annotations

from typing import Any

from megatron.core.optimizer.definition import ModelTensors, OptimizerDefinition, UpdateSettings
from megatron.core.optimizer.muon import Muon


def _build(config: UpdateSettings, param_groups: list[dict[str, Any]], parts: ModelTensors) -> Any:
    mine = {id(tensor) for group in param_groups for tensor in group["params"]}
    return Muon(
        param_groups,
        [item for item in parts.shards if id(item.main_param) in mine],
        parts.matrices,
        parts.groups,
        parts.meshes,
        config,
    )


OPTIMIZER = OptimizerDefinition(name="muon", state_names=("momentum_buffer",), build=_build)
