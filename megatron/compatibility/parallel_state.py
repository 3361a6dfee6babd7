"""Names of `megatron.core.parallel_state` that the framework itself does not use."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields
from datetime import timedelta
from functools import cache
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import distributed_c10d

from megatron.core.foundation.device import current_device
from megatron.core.foundation.errors import ConfigError, TopologyError
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.topology.group import SINGLE_RANK, Group, SingleRank
from megatron.core.topology.rank_grid import RankGrid
from megatron.core.utils import get_pg_rank, get_pg_size

_PRIVATE = {
    "_CONTEXT_PARALLEL_GROUP": "cp",
    "_DATA_PARALLEL_GROUP": "dp",
    "_DATA_PARALLEL_GROUP_WITH_CP": "dp_cp",
    "_EXPERT_MODEL_PARALLEL_GROUP": "ep",
    "_EXPERT_TENSOR_PARALLEL_GROUP": "expt_tp",
    "_MODEL_PARALLEL_GROUP": "mp",
    "_PIPELINE_MODEL_PARALLEL_GROUP": "pp",
    "_TENSOR_MODEL_PARALLEL_GROUP": "tp",
}


def __getattr__(name: str) -> Any:
    """Return a group of the current collection under Megatron's private name; None before."""
    if name in _PRIVATE:
        group = getattr(ProcessGroupCollection.current(), _PRIVATE[name])
        return None if group is SINGLE_RANK else group
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


# Groups ---------------------------------------------------------------------------------


def get_amax_reduction_group(
    with_context_parallel: bool = False, tp_only_amax_red: bool = False
) -> Group:
    """Return the group that reduces the largest magnitude of an FP8 tensor."""
    groups = ProcessGroupCollection.current()
    if tp_only_amax_red:
        return groups.tp_cp if with_context_parallel else groups.tp
    return groups.tp_dp_cp if with_context_parallel else groups.tp_dp


def get_tensor_and_expert_parallel_group(check_initialized: bool = True) -> Group:
    """Return the group of expert-tp x ep."""
    return ProcessGroupCollection.current().tp_ep


def get_tensor_and_expert_parallel_world_size() -> int:
    """Return expert-tp * ep."""
    return get_pg_size(get_tensor_and_expert_parallel_group())


def get_tensor_and_expert_parallel_rank() -> int:
    """Return this rank's position in expert-tp x ep."""
    return get_pg_rank(get_tensor_and_expert_parallel_group())


def get_nccl_options(pg_name: str, nccl_comm_cfgs: Mapping[str, object]) -> None:
    """Return None: communicators have torch's default options.

    Raises:
        ConfigError: options were given for this group.
    """
    if pg_name in nccl_comm_cfgs:
        raise ConfigError(
            f"options of the communicator of group {pg_name!r} were given.",
            rule="communicators are created with torch's defaults",
            flags=["--nccl-communicator-config-path"],
            fix="leave them out; NCCL's environment variables act on all groups",
        )


# Overridden sizes and ranks -------------------------------------------------------------


def _setter(axis: str, sets_rank: bool) -> Callable[[int | None], None]:
    def set_value(value: int | None) -> None:
        groups = ProcessGroupCollection.current()
        group = getattr(groups, axis)
        rank, size = (0, 1) if group is None else (group.rank(), group.size())
        if isinstance(group, _Override):
            group = group.real
        if value is None:
            new = group
        elif sets_rank:
            new = _Override(value, max(size, value + 1), group)
        else:
            new = _Override(min(rank, value - 1), value, group)
        ProcessGroupCollection.set_current(groups.with_groups(**{axis: new}))

    which = "rank" if sets_rank else "size"
    set_value.__doc__ = (
        f"Override the {which} on axis {axis}, to compute shapes; None restores the real {which}."
    )
    return set_value


@dataclass(frozen=True)
class _Override(SingleRank):
    """A rank and a size without processes, and the group that they override."""

    fixed_rank: int
    fixed_size: int
    real: Group | None

    def rank(self) -> int:
        return self.fixed_rank

    def size(self) -> int:
        return self.fixed_size


set_tensor_model_parallel_rank = _setter("tp", True)
set_tensor_model_parallel_world_size = _setter("tp", False)
set_pipeline_model_parallel_rank = _setter("pp", True)
set_pipeline_model_parallel_world_size = _setter("pp", False)
set_expert_model_parallel_rank = _setter("ep", True)
set_expert_model_parallel_world_size = _setter("ep", False)
set_context_parallel_rank = _setter("cp", True)
set_context_parallel_world_size = _setter("cp", False)
set_data_parallel_rank = _setter("dp", True)


def get_all_ranks() -> str:
    """Return this rank's coordinates as text: tp_pp_dp_cp_ep."""
    groups = ProcessGroupCollection.current()
    axes = (groups.tp, groups.pp, groups.dp, groups.cp, groups.ep)
    return "_".join(str(get_pg_rank(group)) for group in axes)


# Encoders and decoders ------------------------------------------------------------------


def get_pipeline_model_parallel_split_rank() -> None:
    """Return None: encoder and decoder have no stages of their own."""


get_pipeline_model_parallel_decoder_start = get_pipeline_model_parallel_split_rank


def is_pipeline_stage_before_split(rank: int | None = None) -> bool:
    """Return True: every stage holds a part of one stack of layers."""
    return True


is_pipeline_stage_after_split = is_pipeline_stage_before_split
is_inside_encoder = is_pipeline_stage_before_split
is_inside_decoder = is_pipeline_stage_before_split


# Ranks of groups as arithmetic ----------------------------------------------------------


class RankGenerator:
    """List the ranks of the groups of a layout, without processes.

    Args:
        tp, ep, dp, pp, cp: sizes of the axes.
        order: axes from the fastest varying to the slowest, joined by "-".
        rank_offset: first rank.
    """

    def __init__(
        self, tp: int, ep: int, dp: int, pp: int, cp: int, order: str, rank_offset: int = 0
    ) -> None:
        self.tp, self.ep, self.dp, self.pp, self.cp = tp, ep, dp, pp, cp
        self.rank_offset = rank_offset
        self.world_size = tp * dp * pp * cp * ep
        sizes = {"tp": tp, "pp": pp, "dp": dp, "ep": ep, "cp": cp}
        axes = order.lower().split("-")
        for axis, size in sizes.items():
            if axis not in axes:
                if size != 1:
                    raise TopologyError(
                        f"{axis} has size {size} and is not in the order {order!r}.",
                        rule="the order of the ranks names every axis that is larger than 1",
                        fix=f"use {'-'.join([*axes, axis])!r}",
                    )
                axes.append(axis)
        self.order = "-".join(axes)
        self.ordered_size = [sizes[axis] for axis in axes]
        self._grid = RankGrid(tuple(axes), tuple(self.ordered_size), rank_offset)

    def get_ranks(self, token: str) -> list[list[int]]:
        """Return the groups along the axes of `token`, such as "tp" or "tp-pp"."""
        return self._grid.groups(*token.split("-"))


# Memory that is used again --------------------------------------------------------------


class GlobalMemoryBuffer:
    """Scratch tensors by name and dtype, each as large as its largest use so far."""

    def __init__(self) -> None:
        self.buffer: dict[tuple[str, torch.dtype], Tensor] = {}

    def get_tensor(
        self,
        tensor_shape: list[int] | torch.Size,
        dtype: torch.dtype,
        name: str,
        mem_alloc_context: object = None,
    ) -> Tensor:
        """Return a view of the scratch tensor `name`; its values are undefined."""
        needed = math.prod(tensor_shape)
        held = self.buffer.get((name, dtype))
        if held is None or held.numel() < needed:
            held = torch.empty(needed, dtype=dtype, device=current_device())
            self.buffer[name, dtype] = held
        return held[:needed].view(*tensor_shape)


@cache
def get_global_memory_buffer() -> GlobalMemoryBuffer:
    """Return the scratch tensors of this process."""
    return GlobalMemoryBuffer()


# Both free the scratch tensors.
_set_global_memory_buffer = destroy_global_memory_buffer = get_global_memory_buffer.cache_clear


def update_pg_timeout(timeout: timedelta, pg: Group | None = None) -> None:
    """Set how long collectives wait for other ranks.

    Args:
        pg: the group; None is the default group and all groups of the current collection.
    """
    current = ProcessGroupCollection.current()
    known = [getattr(current, each.name) for each in fields(current)] if pg is None else [pg]
    if pg is None and dist.is_initialized():
        known.append(dist.group.WORLD)
    for group in {each for each in known if isinstance(each, dist.ProcessGroup)}:
        distributed_c10d._set_pg_timeout(timeout, group)
