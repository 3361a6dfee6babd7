"""Keys of optimizers and schedules that a configuration selects by type."""

from __future__ import annotations

import inspect
from collections.abc import Mapping

from megatron_lattice.deepspeed.lr_schedules import BY_NAME, params_of_schedule
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

_SMALLEST = {
    "total_num_steps": 1,
    "cycle_first_step_size": 1,
    "cycle_second_step_size": 1,
    "lr_range_test_step_size": 1,
    "last_batch_iteration": None,
}
"""Param of a schedule -> its smallest value, where this is not 0."""


def _schedule_key(param: inspect.Parameter) -> Key:
    """Return the key of a schedule's param: its annotation is the type of the values."""
    if param.name == "warmup_type":
        return text("log", ("log", "linear"))
    kind = {"int": int, "float": float, "bool": bool}.get(param.annotation.removesuffix(" | None"))
    if kind is None or kind is bool:  # one number for all groups, or a list
        return anything() if kind is None else switch()
    return Key(kind=(kind,), minimum=_SMALLEST.get(param.name, 0))


SCHEDULERS: Mapping[str, Schema] = {
    name: {param.name: _schedule_key(param) for param in params_of_schedule(name)}
    for name in BY_NAME
}
"""scheduler.type -> its params."""

REQUIRED = {
    name: tuple(p.name for p in params_of_schedule(name) if p.default is p.empty)
    for name in BY_NAME
}
"""Params that a schedule requires."""
