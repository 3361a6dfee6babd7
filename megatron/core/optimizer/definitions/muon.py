"""Muon; its arithmetic is in `optimizer/muon.py`."""

from __future__ import annotations

from typing import Any

from megatron.core.optimizer.definition import ModelTensors, OptimizerDefinition
from megatron.core.optimizer.muon import Muon, MuonSettings
from megatron.core.optimizer.update_settings import UpdateSettings


def _build(config: UpdateSettings, param_groups: list[dict[str, Any]], parts: ModelTensors) -> Any:
    mine = {id(tensor) for group in param_groups for tensor in group["params"]}
    settings = MuonSettings(
        momentum=config.muon_momentum,
        uses_nesterov=config.muon_use_nesterov,
        num_ns_steps=config.muon_num_ns_steps,
        scale_mode=config.muon_scale_mode,
        extra_scale=config.muon_extra_scale_factor,
        tp_mode=config.muon_tp_mode,
        splits_fused=config.muon_split_qkv,
    )
    return Muon(
        param_groups,
        [item for item in parts.shards if id(item.main_param) in mine],
        parts.matrices,
        parts.groups,
        parts.meshes,
        settings,
        lr=config.lr or 0.0,
        weight_decay=config.weight_decay,
    )


OPTIMIZER = OptimizerDefinition(name="muon", state_names=("momentum_buffer",), build=_build)
