"""Keys of optimizers and schedules that a configuration selects by type."""

from __future__ import annotations

from collections.abc import Mapping

from megatron_lattice.deepspeed.schema import (
    LOCAL,
    REMOVED,
    Key,
    Schema,
    anything,
    count,
    number,
    switch,
    text,
)


def _betas(first: float, second: float) -> Key:
    return Key(kind=(list,), default=[first, second], length=2)


_DECAY = number(0.0, 0.0)
_ADAM: Schema = {
    "lr": number(1e-3, 0.0),
    "betas": _betas(0.9, 0.999),
    "eps": number(1e-8, 0.0),
    "weight_decay": _DECAY,
    "bias_correction": switch(True, refused="drop it: moments are always corrected"),
    "amsgrad": switch(refused="pass a torch.optim.AdamW of your own"),
    "adam_w_mode": switch(True),
    "torch_adam": switch(no_effect=LOCAL),
    "fused": switch(no_effect="the fused kernel is always used"),
    "freeze_step": count(refused=REMOVED),
    "max_grad_norm": number(0.0, refused='write "gradient_clipping" at the top level'),
}

OPTIMIZERS: Mapping[str, Schema] = {
    "adam": _ADAM,
    "adamw": _ADAM,
    "lion": {"lr": number(1e-4, 0.0), "betas": _betas(0.9, 0.99), "weight_decay": _DECAY},
    "muon": {
        "lr": number(1e-3, 0.0),
        "momentum": number(0.95, 0.0),
        "weight_decay": _DECAY,
        "ns_steps": count(5, 1),
        "muon_lr": number(None, 0.0),
        "adam_lr": number(None, 0.0),
        "betas": _betas(0.9, 0.999),
        "eps": number(1e-8, 0.0),
    },
    "sgd": {
        "lr": number(1e-3, 0.0),
        "momentum": number(0.0, 0.0),
        "weight_decay": _DECAY,
        "dampening": number(0.0, refused="pass a torch.optim.SGD of your own"),
        "nesterov": switch(refused="pass a torch.optim.SGD of your own"),
    },
}
"""optimizer.type in lower case -> its params. Another class of torch.optim accepts the arguments of
its constructor."""

REFUSED_OPTIMIZERS = {
    "lamb": "its update needs the norm of unsharded weights; use AdamW",
    "fusedlamb": "its update needs the norm of unsharded weights; use AdamW",
    "onebitadam": 'use AdamW with "zero_quantized_gradients": true (int8, errors fed back)',
    "onebitlamb": 'use AdamW with "zero_quantized_gradients": true (int8, errors fed back)',
    "zerooneadam": 'use AdamW with "zero_quantized_gradients": true (int8, errors fed back)',
    "muadam": "use AdamW with groups of parameters of their own lr",
    "muadamw": "use AdamW with groups of parameters of their own lr",
    "musgd": "use SGD with groups of parameters of their own lr",
}

_PROGRESS: Schema = {"last_batch_iteration": Key(kind=(int,), default=-1)}
_WARMUP: Schema = {
    "warmup_num_steps": count(1000),
    "warmup_type": text("log", ("log", "linear")),
    **_PROGRESS,
}
_RATES: Schema = {"warmup_min_lr": anything(), "warmup_max_lr": anything()}
_LENGTH: Schema = {"total_num_steps": count(None, 1)}
SCHEDULERS: Mapping[str, Schema] = {
    "WarmupLR": {**_RATES, **_WARMUP},
    "WarmupDecayLR": {**_LENGTH, **_RATES, **_WARMUP},
    "WarmupCosineLR": {
        **_LENGTH,
        "warmup_min_ratio": number(0.0, 0.0),
        "cos_min_ratio": number(1e-4, 0.0),
        **_WARMUP,
    },
    "OneCycle": {
        "cycle_min_lr": number(None, 0.0),
        "cycle_max_lr": number(None, 0.0),
        "decay_lr_rate": number(0.0, 0.0),
        "cycle_first_step_size": count(2000, 1),
        "cycle_second_step_size": count(None, 1),
        "cycle_first_stair_count": count(0),
        "cycle_second_stair_count": count(None),
        "decay_step_size": count(0),
        "cycle_momentum": switch(True),
        "cycle_min_mom": number(0.8, 0.0),
        "cycle_max_mom": number(0.9, 0.0),
        "decay_mom_rate": number(0.0, 0.0),
        **_PROGRESS,
    },
    "LRRangeTest": {
        "lr_range_test_min_lr": anything(),
        "lr_range_test_step_size": count(2000, 1),
        "lr_range_test_step_rate": number(1.0, 0.0),
        "lr_range_test_staircase": switch(),
        **_PROGRESS,
    },
}
"""scheduler.type -> its params."""

REQUIRED = {
    "WarmupDecayLR": ("total_num_steps",),
    "WarmupCosineLR": ("total_num_steps",),
    "OneCycle": ("cycle_min_lr", "cycle_max_lr"),
}
"""Params that a schedule requires."""
