"""Reductions of gradients and gathers of parameters over the replicas of a model.

The sum of an element is computed in rank order (`transport.transport`), so it depends
neither on the bucket it travels in nor on whether the state is sharded: every ZeRO stage gives the
same bits. Half-precision gradients are added in fp32.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from megatron.core.foundation.errors import MegatronError
from megatron.core.topology.group import SINGLE_RANK, Group
from megatron.core.transport import backend
from megatron.core.transport.comm_buffer import BucketSlot
from megatron.core.transport.object_collectives import raise_on_all_ranks
from megatron.core.transport.ordered_sum import piece_of
from megatron.core.transport.transport import (
    has_tags,
    message_transport,
    select_bucket_transport,
)
from megatron.core.transport.work import Steps, Work

SUM_TAG = (1 << 31) - 1
"""Message tag of `sum_in_place`, different from those of buckets."""


@dataclass(frozen=True, kw_only=True)
class Mesh:
    """The ranks that hold copies of the same weights, as a grid of two axes.

    Plain data parallelism has no `shard` axis; ZeRO over all ranks has no `replicate` axis; with
    both, state is sharded inside and copied across (HSDP).
    """

    shard: Group
    replicate: Group

    @property
    def shard_size(self) -> int:
        """Ranks over which state is cut."""
        return self.shard.size()

    @property
    def shard_rank(self) -> int:
        """Which shard this rank owns."""
        return self.shard.rank()

    @property
    def replicate_size(self) -> int:
        """Copies of each shard."""
        return self.replicate.size()

    @property
    def size(self) -> int:
        """Ranks that hold copies of the weights."""
        return self.shard_size * self.replicate_size

    def agreed(self, problem: MegatronError | None) -> MegatronError | None:
        """Return a problem that any rank of the mesh has; None if no rank has one.

        Communication: see `raise_on_all_ranks`, on both axes.
        """
        for group in (self.shard, self.replicate):
            try:
                raise_on_all_ranks(problem, group)
            except MegatronError as error:
                problem = error  # for the ranks of the other axis, too
        return problem

    def own(self, bucket: Tensor) -> Tensor:
        """Return this rank's shard [n/dp] of a bucket [n], as a view."""
        return piece_of(bucket, self.shard_rank, self.shard_size)


UNSHARDED = Mesh(shard=SINGLE_RANK, replicate=SINGLE_RANK)
"""One rank holds the weights."""


class Compression(Protocol):
    """Compression of the gradients of one bucket; see `compression.reduction`."""

    def is_on(self, bucket: Tensor, mesh: Mesh) -> bool:
        """Return whether the reduction that begins is to be compressed. Called once for each."""
        ...

    def reduce(self, bucket: Tensor, mesh: Mesh, factor: float, tag: int) -> Steps[None]:
        """Leave factor * sum over the mesh in `mesh.own(bucket)`."""
        ...


def gather_parameters(
    bucket: Tensor,
    mesh: Mesh,
    *,
    tag: int,
    shard: Tensor | None = None,
    slot: BucketSlot | None = None,
) -> Work[Tensor]:
    """Fill a bucket with the shards of all ranks of `mesh.shard`.

    Args:
        bucket: [n].
        shard: [n / size], this rank's contribution; None is `mesh.own(bucket)`.
        slot: of the shard. It may not change before `slot.memory.wait_for_readers()`.
    """
    transport = select_bucket_transport(mesh.shard, tag, slot)
    if transport is not None:
        return transport.all_gather(mesh.own(bucket) if shard is None else shard, out=bucket)
    if shard is not None:
        bucket.copy_(shard)
    return Work.completed(bucket)


def sum_in_place(flat: Tensor, group: Group) -> None:
    """Sum a flat tensor [n] over a group, in place; on gloo in rank order, equal on all ranks."""
    if group.size() == 1:
        return
    if flat.numel() % group.size() or not has_tags(group):
        backend.all_reduce(flat, group)
        return
    message_transport(group, SUM_TAG, is_in_order=True).all_reduce(flat).wait()


def broadcast_from_first(copies: Sequence[tuple[Tensor, Group]]) -> None:
    """Overwrite each tensor by that of the first rank of its group."""
    for work in [backend.start_broadcast(tensor, group) for tensor, group in copies]:
        work.wait()


def reduce_gradients(
    bucket: Tensor,
    mesh: Mesh,
    *,
    scale: float,
    tag: int,
    average: bool = False,
    compression: Compression | None = None,
    slot: BucketSlot | None = None,
    into: Tensor | None = None,
) -> Steps[Tensor]:
    """Sum a bucket of gradients over the mesh.

    Args:
        bucket: [n], n divisible by the mesh size. Afterwards it is undefined but for the sums.
        scale: factor on the sum.
        tag: tells the messages of different buckets apart.
        average: let the collective average over the ranks, where the backend can (`scale` then
            does not contain 1/size).
        compression: that of this bucket, step after step.
        slot: of the bucket, if ranks of this machine can read it.
        into: [n / shard size], memory for the sums that are wanted elsewhere: used where that saves
            a copy.
    Returns:
        at its end, where the sum of this rank's shard over all ranks is: `mesh.own(bucket)`
        (without a shard axis all of the bucket), or `into`.
    Communication:
        a reduce-scatter on `mesh.shard`, then an all-reduce of the own shard on
        `mesh.replicate`; axes of size 1 cost nothing.
    """
    groups = [axis for axis in (mesh.shard, mesh.replicate) if axis.size() > 1]
    sums_in_order = all(has_tags(group) for group in groups)
    is_compressed = compression is not None and compression.is_on(bucket, mesh)
    factor = scale / mesh.size if average and (sums_in_order or is_compressed) else scale
    if compression is not None and is_compressed:
        yield from compression.reduce(bucket, mesh, factor, tag)
        return mesh.own(bucket)
    # Both at the start: to share memory for the first time is a collective.
    is_in_order = len(groups) == 1  # ranks reach a second step in different orders
    shard, replicate = (
        select_bucket_transport(axis, tag, slot, averages=average, is_in_order=is_in_order)
        for axis in (mesh.shard, mesh.replicate)
    )
    if shard is None and replicate is None:
        if factor != 1.0:
            bucket.mul_(factor)
        return bucket
    # The factor goes with the last sum; with a native one, which scales before, with the first.
    first, last = (1.0, factor) if sums_in_order else (factor, 1.0)
    if shard is None:
        assert replicate is not None
        return (yield from replicate.all_reduce(bucket, factor))
    own = mesh.own(bucket)
    if replicate is None:
        return (yield from shard.reduce_scatter(bucket, factor, out=own if into is None else into))
    yield from shard.reduce_scatter(bucket, first, out=own)
    return (yield from replicate.all_reduce(own, last))
