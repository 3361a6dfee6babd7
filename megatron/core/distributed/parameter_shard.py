"""The pieces of parameters that this rank updates, for the optimizer."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from megatron.core.distributed.communication import Mesh
from megatron.core.offload.device_copies import AsyncFetch


@dataclass(frozen=True, eq=False)
class ParameterShard:
    """The part of a parameter that this rank updates."""

    name: str
    """Name of the parameter in its model chunk."""
    parameter: nn.Parameter
    begin: int
    end: int
    """[begin, end) of the flattened parameter."""
    values: Tensor
    """The model's values: the parameter itself if whole, else a 1-d view into it."""
    gradient: Tensor | None
    """The reduced gradient, of the shape of `values`; None: the optimizer reads `.grad`."""
    mesh: Mesh
    """The ranks that hold the other shards, and copies of this one."""
    fetch: AsyncFetch | None = None
    """Copies new values that are computed in host memory; None: they are written to `values`."""

    def reduced_gradient(self) -> Tensor | None:
        """Return the gradient, of the shape of `values`; None if backward computed none."""
        if self.gradient is not None:
            return self.gradient
        gradient: Any = self.parameter.grad
        if hasattr(gradient, "to_local"):  # sharded by torch
            return gradient.to_local().view(self.values.shape)
        return gradient

    @property
    def is_full(self) -> bool:
        """Whether this is all of the parameter."""
        return self.end - self.begin == self.parameter.numel()


@dataclass(frozen=True, eq=False)
class ShardSpan:
    """Consecutive shards in a flat gradient tensor."""

    gradients: Tensor
    """[k * BLOCK]; the elements between the shards are zero."""
    shards: list[ParameterShard]
    num_blocks: list[int]
    """Blocks of each shard, with the padding after it; empty if the span is all padding."""


@dataclass(frozen=True, eq=False)
class MainParamShard:
    """A shard of a parameter and the fp32 tensor that the optimizer updates for it."""

    shard: ParameterShard
    main_param: nn.Parameter
    """The model's own values if they are fp32 (a view if the rank owns a part only), else a copy.
    With chunked state always the model's own values, because the state includes main weights."""
    param_index: tuple[int, int]
    """(model chunk, number of the parameter in it)."""

    @property
    def is_copy(self) -> bool:
        """Whether the model's values must be written from `main_param` after an update."""
        return self.main_param.data_ptr() != self.shard.values.data_ptr()


def main_param_of(shard: ParameterShard, *, is_chunked: bool = False) -> nn.Parameter:
    """Return the tensor that the optimizer updates for a shard."""
    if shard.values.dtype != torch.float32 and not is_chunked:
        return nn.Parameter(shard.values.detach().float())
    if shard.values is shard.parameter:
        return shard.parameter
    return nn.Parameter(shard.values.detach())
