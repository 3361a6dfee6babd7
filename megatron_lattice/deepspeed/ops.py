"""`deepspeed.ops`: torch's fused Adam and AdamW, and the library's own Lion."""

from __future__ import annotations

import torch
from torch.optim.optimizer import ParamsT

from megatron.core.foundation.errors import ConfigError
from megatron.core.optimizer.definitions.lion import Lion as FusedLion

__all__ = ["DeepSpeedCPUAdam", "FusedAdam", "FusedLion"]


def FusedAdam(
    params: ParamsT,
    lr: float = 1e-3,
    bias_correction: bool = True,
    betas: tuple[float, float] = (0.9, 0.999),
    eps: float = 1e-8,
    adam_w_mode: bool = True,
    weight_decay: float = 0.0,
    amsgrad: bool = False,
    set_grad_none: bool = True,
) -> torch.optim.Optimizer:
    """Return AdamW, or Adam with `adam_w_mode=False`; `set_grad_none` is always on.

    Raises:
        ConfigError: `bias_correction` is off.
    """
    if not bias_correction:
        raise ConfigError(
            "FusedAdam(bias_correction=False).",
            rule="moments are always corrected for their start at zero",
            fix="drop it, and lower betas[1] for a short memory",
        )
    kind = torch.optim.AdamW if adam_w_mode else torch.optim.Adam
    return kind(
        params, lr=lr, betas=betas, eps=eps, weight_decay=weight_decay, amsgrad=amsgrad, fused=True
    )


def DeepSpeedCPUAdam(
    model_params: ParamsT,
    lr: float = 1e-3,
    bias_correction: bool = True,
    betas: tuple[float, float] = (0.9, 0.999),
    eps: float = 1e-8,
    weight_decay: float = 0.0,
    amsgrad: bool = False,
    adamw_mode: bool = True,
    fp32_optimizer_states: bool = True,
) -> torch.optim.Optimizer:
    """Return AdamW or Adam; the configuration determines where its state is stored."""
    if not fp32_optimizer_states:
        raise ConfigError(
            "DeepSpeedCPUAdam(fp32_optimizer_states=False).",
            rule="the moments of Adam are fp32",
            fix="leave it out",
        )
    return FusedAdam(
        model_params, lr, bias_correction, betas, eps, adamw_mode, weight_decay, amsgrad
    )
