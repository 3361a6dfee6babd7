"""The unit of ZeRO stage 3: parameters that are gathered and freed together."""

from __future__ import annotations

from enum import Enum

from torch import Tensor, nn

from megatron.core.distributed.flat_params import Bucket
from megatron.core.transport.unit_memory import UnitTensor
from megatron.core.transport.work import AnyWork


class Pass(Enum):
    """Who computes with a unit. One of each may run in a model chunk, overlapped."""

    FORWARD = "forward"
    BACKWARD = "backward"
    """With the forward passes inside it that recompute activations."""


class FlatParam:
    """Buckets whose parameters are unsharded at the same times."""

    def __init__(self, buckets: list[Bucket], unsharded: UnitTensor) -> None:
        self.buckets = buckets
        self.param_indices = sorted({index for bucket in buckets for index in bucket.param_indices})
        """Numbers of the parameters; none is in another one."""
        self.unsharded = unsharded
        """[n]; with memory from `start_gather` to the last `release` only."""
        self.views: list[tuple[nn.Parameter, Tensor]] = []
        """The parameters and their values in `unsharded`."""
        self.is_unsharded = False
        self.users: set[Pass] = set()
        """Passes that have asked for it and have not released it."""
        self.gathers: list[AnyWork] = []
        """In flight."""

    @property
    def is_sharded(self) -> bool:
        """Whether the gradients go out in several buckets."""
        return len(self.buckets) > 1

    @property
    def is_complete(self) -> bool:
        """Whether all gradients of a backward pass have arrived."""
        return not any(bucket.num_pending for bucket in self.buckets)

    def part_of(self, bucket: Bucket) -> Tensor:
        """Return the values [n] of a bucket in `unsharded`."""
        begin = self.buckets[0].begin
        return self.unsharded.tensor[bucket.begin - begin : bucket.end - begin]
