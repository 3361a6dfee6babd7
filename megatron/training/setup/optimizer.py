"""The optimizer and the schedules of learning rate and weight decay."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

from torch import nn

from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
from megatron.core.optimizer.optimizer_config import DTYPES
from megatron.core.optimizer.param_groups import parse_rule
from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler
from megatron.core.process_groups_config import ProcessGroupCollection


def optimizer_config(settings: Mapping[str, Any]) -> OptimizerConfig:
    """Return the optimizer's settings: its fields have the flags' names."""
    fields = {
        field.name: DTYPES.get(settings[field.name], settings[field.name])
        if field.name.endswith("_dtype")
        else settings[field.name]
        for field in dataclasses.fields(OptimizerConfig)
        if field.name != "timers" and settings.get(field.name) is not None
    }
    if not settings["check_for_nan_in_loss_and_grad"]:
        fields["on_nonfinite_grad"] = "skip"
    return OptimizerConfig(**fields)


def build_optimizer(
    settings: Mapping[str, Any], model: Sequence[nn.Module], groups: ProcessGroupCollection
) -> Any:
    """Return the optimizer of this rank's chunks."""
    return get_megatron_optimizer(
        optimizer_config(settings),
        list(model),
        dict(parse_rule(text) for text in settings["param_rules"]),
        pg_collection=groups,
    )


def build_scheduler(settings: Mapping[str, Any], optimizer: Any) -> OptimizerParamScheduler:
    """Return the schedules; they count samples (see `resolve`)."""
    return OptimizerParamScheduler(
        optimizer,
        init_lr=settings["lr_warmup_init"],
        max_lr=settings["lr"],
        min_lr=settings["min_lr"],
        lr_warmup_steps=settings["lr_warmup_steps"],
        lr_decay_steps=settings["lr_decay_steps"],
        lr_decay_style=settings["lr_decay_style"],
        start_wd=settings["start_weight_decay"],
        end_wd=settings["end_weight_decay"],
        wd_incr_steps=settings["wd_incr_steps"],
        wd_incr_style=settings["weight_decay_incr_style"],
        use_checkpoint_opt_param_scheduler=settings["use_checkpoint_opt_param_scheduler"],
        override_opt_param_scheduler=settings["override_opt_param_scheduler"],
        wsd_decay_steps=settings["wsd_decay_steps"],
        lr_wsd_decay_style=settings["lr_wsd_decay_style"],
        samples_per_iteration=None
        if settings["is_sample_based"]
        else settings["global_batch_size"],
    )
