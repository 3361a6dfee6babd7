"""The parts of a buffer of sharded parameters that are gathered and freed as wholes."""

from __future__ import annotations

from enum import Enum

from torch import Tensor, nn

from megatron.core.distributed.bucketed_buffer import Bucket
from megatron.core.transport.shm.mapped_gather import MappedTensor
from megatron.core.transport.shm.page_pool import PooledTensor
from megatron.core.transport.work import Work


class Pass(Enum):
    """Who computes with a bucket. One of each may be under way in a model chunk, taking turns."""

    FORWARD = "forward"
    BACKWARD = "backward"
    """With the forward passes inside it that recompute activations."""


class Section:
    """Buckets whose parameters are whole at the same times."""

    def __init__(self, buckets: list[Bucket], whole: PooledTensor | MappedTensor) -> None:
        self.buckets = buckets
        self.members = sorted({index for bucket in buckets for index in bucket.members})
        """Numbers of the parameters; none lies in another section."""
        self.whole = whole
        """[n]; with memory from `start_gather` to the last `release` only."""
        self.views: list[tuple[nn.Parameter, Tensor]] = []
        """The parameters and their places in `whole`."""
        self.is_whole = False
        self.users: set[Pass] = set()
        """Passes that have asked for it and have not released it."""
        self.arriving: list[Work] = []

    @property
    def is_cut(self) -> bool:
        """Whether the gradients go out in several buckets."""
        return len(self.buckets) > 1

    @property
    def is_complete(self) -> bool:
        """Whether all gradients of a backward pass have arrived."""
        return not any(bucket.num_missing for bucket in self.buckets)

    def part_of(self, bucket: Bucket) -> Tensor:
        """Return where a bucket lies in `whole`."""
        begin = self.buckets[0].begin
        return self.whole.tensor[bucket.begin - begin : bucket.end - begin]
