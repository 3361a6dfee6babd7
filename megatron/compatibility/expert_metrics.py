"""Megatron's function that logs balance losses of experts."""

from __future__ import annotations

from collections.abc import Mapping, MutableMapping, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor

from megatron.core.process_groups_config import ProcessGroupCollection, resolve_groups
from megatron.core.transformer.moe.load_balancing import AUX_LOSS_NAMES, loads_of_last_step
from megatron.core.transport.object_collectives import all_gather_object


class _ScalarWriter(Protocol):
    def add_scalar(self, tag: str, scalar_value: Any, global_step: int) -> None: ...


class _Run(Protocol):
    def log(self, data: Mapping[str, Any], step: int) -> None: ...


def track_moe_metrics(
    loss_scale: float,
    iteration: int,
    writer: _ScalarWriter | None = None,
    wandb_writer: _Run | None = None,
    total_loss_dict: MutableMapping[str, Tensor] | None = None,
    per_layer_logging: bool = False,
    force_initialize: bool = False,
    track_names: Sequence[str] | None = None,
    num_layers: int | None = None,
    moe_layer_freq: int | Sequence[int] | None = None,
    mtp_num_layers: int | None = None,
    pg_collection: ProcessGroupCollection | None = None,
) -> None:
    """Log the balance losses of the last step, without coefficients, as means over its layers.

    All ranks call it. `loss_scale` and `force_initialize` change nothing: routers keep means over
    micro batches, and count from the first step on. Which layers have experts is asked of the
    model, not of `moe_layer_freq` and `mtp_num_layers`.

    Args:
        writer, wandb_writer: get each loss by its name and, with `per_layer_logging`,
            `moe/NAME_layer_N` with N from 0.
        total_loss_dict: the mean of each loss [] is added to its entry.
        track_names: log these only, as 0 where no router has them.
        num_layers: layers of the whole model: those without experts are logged as 0.
    Communication:
        with pipeline stages, one all-gather of small Python objects over `pp`.
    """
    names = AUX_LOSS_NAMES.values() if track_names is None else track_names
    own = [(load.layer_number - 1, load.step_losses) for load in loads_of_last_step()]
    stages = all_gather_object(own, resolve_groups(pg_collection).pp)
    loads = [load for stage in stages for load in stage]
    scalars: dict[str, float] = {}
    for name in names:
        layers = dict.fromkeys(range(num_layers or 0), 0.0)
        for layer, losses in loads:
            values = [value for kind, value in losses.items() if AUX_LOSS_NAMES[kind] == name]
            layers[layer] = layers.get(layer, 0.0) + sum(values)
        mean = sum(layers.values()) / max(len(loads), 1)
        scalars[name] = mean
        if per_layer_logging:
            scalars |= {f"moe/{name}_layer_{n}": value for n, value in layers.items()}
        if total_loss_dict is not None:
            total_loss_dict[name] = total_loss_dict.get(name, torch.zeros(())) + mean
    if writer is not None:
        for tag, value in scalars.items():
            writer.add_scalar(tag, value, iteration)
    if wandb_writer is not None:
        wandb_writer.log(scalars, iteration)
