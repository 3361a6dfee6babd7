"""Adam, and with decoupled weight decay AdamW.

D. P. Kingma, J. Ba, "Adam: A Method for Stochastic Optimization", arXiv 1412.6980; I. Loshchilov,
F. Hutter, "Decoupled Weight Decay Regularization", arXiv 1711.05101. The kernels are torch's.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch.optim.adam import adam
from torch.optim.adamw import adamw

from megatron.core.optimizer.definition import (
    ADAM,
    ADAMW,
    ModelTensors,
    OptimizerDefinition,
    Pieces,
    UpdateSettings,
    eager,
    has_fused_kernel,
)

_Adam, _AdamW = eager(torch.optim.Adam), eager(torch.optim.AdamW)


def update_adam(pieces: Pieces, *, decouples_decay: bool) -> None:
    """Update `pieces` in place."""
    device = pieces.weights[0].device
    beta1, beta2 = pieces.settings["betas"]
    (adamw if decouples_decay else adam)(
        pieces.weights,
        pieces.gradients,
        list(pieces.states["exp_avg"]),
        list(pieces.states["exp_avg_sq"]),
        [],
        [torch.full((), float(pieces.step), device=device) for _ in pieces.weights],
        fused=True,
        amsgrad=False,
        beta1=beta1,
        beta2=beta2,
        lr=pieces.settings["lr"],
        weight_decay=pieces.settings["weight_decay"],
        eps=pieces.settings["eps"],
        maximize=False,
        **pieces.scaling(),
    )


def _constants(config: UpdateSettings) -> dict[str, Any]:
    return {"betas": (config.adam_beta1, config.adam_beta2), "eps": config.adam_eps}


def _build(config: UpdateSettings, param_groups: list[dict[str, Any]], _: ModelTensors) -> Any:
    return (_AdamW if config.decoupled_weight_decay else _Adam)(
        param_groups,
        lr=config.lr or 0.0,
        weight_decay=config.weight_decay,
        fused=has_fused_kernel(param_groups),
        **_constants(config),
    )


OPTIMIZER = OptimizerDefinition(
    name="adam",
    state_names=("exp_avg", "exp_avg_sq"),
    constants=_constants,
    update=lambda config: partial(update_adam, decouples_decay=config.decoupled_weight_decay),
    kind=lambda config: ADAMW if config.decoupled_weight_decay else ADAM,
    build=_build,
)
