"""Common parts of parallel layers: their group, their shards, and the shards' metadata."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from megatron.core.foundation.device import current_device
from megatron.core.model_parallel_config import ModelParallelConfig
from megatron.core.parameters.initialization import full_weight, initialization_is_deferred
from megatron.core.parameters.param_meta import (
    ParamMeta,
    full_shape,
    get_param_meta,
    set_param_meta,
    shard_of,
)
from megatron.core.process_groups_config import resolve_group
from megatron.core.tensor_parallel.unit_products import Units
from megatron.core.topology.group import Group
from megatron.core.utils import divide


class ParallelLayer(nn.Module):
    """Base of layers whose parameters are split over a tensor-parallel group.

    Attributes:
        tp_group: the group.
        is_expert: the layer belongs to a routed expert and is split over the expert grid.
    """

    def __init__(
        self,
        config: ModelParallelConfig,
        *,
        tp_group: Group,
        is_expert: bool = False,
    ) -> None:
        super().__init__()
        self.config = config
        self.is_expert = is_expert
        self.tp_group = tp_group

    @property
    def tp_rank(self) -> int:
        """Position in the tensor-parallel group."""
        return self.tp_group.rank()

    @property
    def tp_size(self) -> int:
        """Number of ranks that the layer is split over."""
        return self.tp_group.size()

    @property
    def split_axis(self) -> str:
        """Name of the axis that `ParamMeta` uses for the split."""
        return "expt_tp" if self.is_expert else "tp"

    def units(self, dim: int, blocks: int) -> Units | None:
        """Return this rank's units of a weight split along `dim`; None without units."""
        config = self.config
        if not config.layout_invariant_mode:
            return None
        runs = 1 if self.is_expert else config.sequence_units_of_rank
        count = divide(config.tensor_units, self.tp_size)
        return Units(dim, count, blocks, runs, config.batch_invariant_mode)

    def new_parameter(
        self,
        *shape: int,
        init_method: Callable[[Tensor], object] | None,
        split_dim: int | None,
        stride: int = 1,
        partial_grad_axes: tuple[str, ...] = (),
        is_embedding_or_output: bool = False,
        num_rows: int | None = None,
    ) -> nn.Parameter:
        """Allocate this rank's shard, attach its metadata and fill it (unless that is deferred).

        Args:
            shape: local shape.
            init_method: fills the *full* tensor; None leaves zeros. All ranks of the group must
                hold the same state of the default generator: each draws the full tensor and
                keeps its shard.
            num_rows: rows of the full tensor that are not padding; None: all.
        """
        parameter = empty_parameter(self.config, *shape)
        meta = ParamMeta(
            split_dim=split_dim,
            split_axis=None if split_dim is None else self.split_axis,
            stride=stride,
            init_method=init_method,
            partial_grad_axes=partial_grad_axes,
            is_expert=self.is_expert,
            is_embedding_or_output=is_embedding_or_output,
            num_rows=num_rows,
        )
        if init_method is None:
            nn.init.zeros_(parameter)
        return fill_parameter(parameter, meta, self.config, self.tp_group)


def empty_parameter(config: ModelParallelConfig, *shape: int) -> nn.Parameter:
    """Allocate a parameter in the dtype and on the device of the config's parameters."""
    device = device_of_parameters(config)
    return nn.Parameter(torch.empty(shape, dtype=config.params_dtype, device=device))


def device_of_parameters(config: ModelParallelConfig) -> torch.device:
    """Return the device of new parameters."""
    return torch.device("cpu") if config.use_cpu_initialization else current_device()


@torch.no_grad()
def fill_parameter(
    parameter: nn.Parameter, meta: ParamMeta, config: ModelParallelConfig, tp: Group
) -> nn.Parameter:
    """Attach metadata, and write this rank's slice of the initial values unless that is deferred.

    Args:
        tp: the ranks that split the parameter.
    """
    set_param_meta(parameter, meta)
    draws = config.perform_initialization and not initialization_is_deferred()
    if meta.init_method is not None and draws:
        shape = full_shape(parameter.shape, meta, tp.size())
        full = full_weight(shape, meta, meta.init_method, parameter.device)
        parameter.copy_(shard_of(full, meta, tp.rank(), tp.size()))
    return parameter


class ParallelLinear(ParallelLayer):
    """A parallel layer with Megatron's (empty) `_extra_state` entry of linear layers."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.register_load_state_dict_pre_hook(tolerate_missing_extra_state)

    def get_extra_state(self) -> None:
        """Return None: the entry exists because checkpoints of other backends have one."""

    def set_extra_state(self, state: object) -> None:
        """Ignore the state of another backend (scaling factors of low precision)."""


def tolerate_missing_extra_state(
    _module: nn.Module, state_dict: dict[str, object], prefix: str, *_: object
) -> None:
    """Add the entry if a state lacks it, so that it loads strictly: a hook before loading."""
    state_dict.setdefault(f"{prefix}_extra_state", None)


# Megatron's names for reading and writing this metadata ----------------------------------------


def set_tensor_model_parallel_attributes(
    tensor: Tensor, is_parallel: bool, dim: int, stride: int
) -> None:
    """Mark `tensor` as a shard along `dim` (in `stride` blocks), or as whole."""
    meta = ParamMeta(split_dim=dim, split_axis="tp", stride=stride) if is_parallel else ParamMeta()
    set_param_meta(tensor, meta)


def set_defaults_if_not_set_tensor_model_parallel_attributes(tensor: Tensor) -> None:
    """Set default metadata on a tensor without metadata."""
    set_param_meta(tensor, get_param_meta(tensor))


def copy_tensor_model_parallel_attributes(
    destination_tensor: Tensor, source_tensor: Tensor
) -> None:
    """Copy the metadata of `source_tensor` to `destination_tensor`."""
    set_param_meta(destination_tensor, get_param_meta(source_tensor))


def param_is_not_tensor_parallel_duplicate(param: Tensor, tp_group: Group | None = None) -> bool:
    """Return whether this rank counts `param`, for example in a norm."""
    if get_param_meta(param).split_dim is not None:
        return True
    return resolve_group(tp_group, "tp").rank() == 0
