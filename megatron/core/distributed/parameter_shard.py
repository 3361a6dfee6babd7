"""The pieces of parameters that this rank updates, for the optimizer."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

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
