"""Stochastic gradient descent with momentum, by torch's kernels."""

from __future__ import annotations

from typing import Any

import torch
from torch.optim.sgd import sgd

from megatron.core.optimizer.definition import (
    ModelTensors,
    OptimizerDefinition,
    Pieces,
    UpdateSettings,
    eager,
    has_fused_kernel,
)

_SGD: Any = eager(torch.optim.SGD)


def update_sgd(pieces: Pieces) -> None:
    """Update `pieces` in place."""
    sgd(
        pieces.weights,
        pieces.gradients,
        list(pieces.states.get("momentum_buffer", [None] * len(pieces.weights))),
        fused=True,
        weight_decay=pieces.settings["weight_decay"],
        momentum=pieces.settings["momentum"],
        lr=pieces.settings["lr"],
        dampening=0.0,
        nesterov=False,
        maximize=False,
        **pieces.scaling(),
    )


def _build(config: UpdateSettings, param_groups: list[dict[str, Any]], _: ModelTensors) -> Any:
    optimizer = _SGD(
        param_groups,
        lr=config.lr or 0.0,
        momentum=config.sgd_momentum,
        weight_decay=config.weight_decay,
        fused=has_fused_kernel(param_groups),
    )
    optimizer.in_whole_vectors = config.in_whole_vectors
    return optimizer


OPTIMIZER = OptimizerDefinition(
    name="sgd",
    state_names=("momentum_buffer",),
    has_state=lambda config: config.sgd_momentum != 0.0,
    constants=lambda config: {"momentum": config.sgd_momentum},
    update=lambda _config: update_sgd,
    build=_build,
)
