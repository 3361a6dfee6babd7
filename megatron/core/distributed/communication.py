"""Reductions of gradients and gathers of parameters, as steps that run beside the computation.

A reduction is a generator: it starts communication, yields the handles, and continues when they
are done. `Transfer` advances it. All ranks of a group start the same transfers in the same order;
messages of later steps are told apart by tags.

On gloo the ranks exchange pieces directly: each rank receives the others' copies of the piece it
will own, adds them in rank order, and (if everybody needs all pieces) sends the sum back. That
moves the bytes of a ring, 2 (n-1)/n per element, without the ring's copies. The sum of an element
depends neither on the bucket it travels in nor on whether the state is sharded, so every ZeRO
stage gives the same bits. Half-precision gradients are added in fp32.

Ranks of one machine send nothing: they read each other's gradients and parameters in place
(`transport.shm.shared_buffer`), in the same order. Otherwise two ranks that both need all of the
sum use gloo's own all-reduce: a + b = b + a to the bit, and its threads make progress by
themselves.

Other backends (NCCL) use their native collectives.
"""

from __future__ import annotations

from collections.abc import Generator, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch.distributed as dist
from torch import Tensor

from megatron.core.process_groups_config import Group
from megatron.core.transport.p2p_reduce import (
    P2PTransport,
    SharedSlot,
    Steps,
    global_rank,
    is_half,
    is_pairwise,
    piece_of,
    select_transport,
)
from megatron.core.utils import get_pg_rank, get_pg_size

SumSteps = Generator[Sequence[Any], None, Tensor]
"""Steps that tell at their end where the sum is."""
SUM_TAG = (1 << 31) - 1
"""Message tag of `sum_in_place`, apart from those of buckets."""


@dataclass(frozen=True)
class Mesh:
    """The ranks that hold copies of the same weights, as a grid of two axes.

    Plain data parallelism has no `shard` axis; ZeRO over all ranks has no `replicate` axis; with
    both, state is sharded inside and copied across (HSDP).
    """

    shard: Group = None
    replicate: Group = None

    @property
    def shard_size(self) -> int:
        """Ranks over which state is cut."""
        return get_pg_size(self.shard)

    @property
    def shard_rank(self) -> int:
        """Which shard this rank owns."""
        return get_pg_rank(self.shard)

    @property
    def replicate_size(self) -> int:
        """Copies of each shard."""
        return get_pg_size(self.replicate)

    @property
    def size(self) -> int:
        """Ranks that hold copies of the weights."""
        return self.shard_size * self.replicate_size

    def own(self, bucket: Tensor) -> Tensor:
        """Return this rank's shard [n/dp] of a bucket [n], as a view."""
        return piece_of(bucket, self.shard_rank, self.shard_size)


class Compression(Protocol):
    """Another way for the gradients of one bucket to travel; see `compressed_reduction`."""

    def is_on(self, bucket: Tensor, mesh: Mesh) -> bool:
        """Return whether the reduction that begins is to be compressed. Called once for each."""
        ...

    def steps(self, bucket: Tensor, mesh: Mesh, factor: float, tag: int) -> Steps:
        """Leave factor * sum over the mesh in `mesh.own(bucket)`."""
        ...


class Transfer:
    """Communication under way; nothing else may touch its buffer until `finish`."""

    def __init__(self, steps: Steps) -> None:
        self._steps = steps
        self.num_steps_done = 0
        self._handles = next(steps, None)

    @property
    def is_finished(self) -> bool:
        """Whether the result is in the buffer."""
        return self._handles is None

    def poll(self) -> None:
        """Advance if that needs no waiting. Some backends cannot tell: then do nothing."""
        if self._handles is not None and all(handle.is_completed() for handle in self._handles):
            self.advance()

    def advance(self) -> None:
        """Wait for what is in flight, compute on it, and start what follows."""
        if self._handles is not None:
            for handle in self._handles:
                handle.wait()
            self.num_steps_done += 1
            self._handles = next(self._steps, None)

    def finish(self) -> None:
        """Advance to the end."""
        while self._handles is not None:
            self.advance()


def finish_all(transfers: Sequence[Transfer]) -> None:
    """Finish several transfers, keeping all of them moving.

    Always the one that is furthest behind, and of these the first. Polling has brought them to
    different steps on each rank: who waited for a late step of one, while the others wait for an
    early step of another one, would wait for ever.
    """
    num_done = 0
    while not all(transfer.is_finished for transfer in transfers):
        for transfer in transfers:
            if transfer.num_steps_done == num_done:
                transfer.advance()
        num_done += 1


def gather_parameters(
    bucket: Tensor,
    mesh: Mesh,
    *,
    tag: int,
    shard: Tensor | None = None,
    place: SharedSlot | None = None,
) -> Transfer:
    """Fill a bucket with the shards of all ranks of `mesh.shard`.

    Args:
        bucket: [n].
        shard: [n / size], this rank's contribution; None is `mesh.own(bucket)`.
        place: of the shard. It may not change before `place.memory.wait_for_readers()`.
    """
    own = mesh.own(bucket)
    if shard is not None:
        own.copy_(shard)
    if mesh.shard_size == 1 or not is_pairwise(mesh.shard):
        return Transfer(_gather_natively(bucket, mesh.shard))
    way = select_transport(mesh.shard, tag, place)
    assert way is not None
    return Transfer(way.gather(bucket, own if shard is None else shard))


def _gather_natively(bucket: Tensor, group: Group) -> Steps:
    rank, size = get_pg_rank(group), get_pg_size(group)
    if size > 1:
        own = piece_of(bucket, rank, size)
        yield [dist.all_gather_into_tensor(bucket, own, group, async_op=True)]


def sum_in_place(flat: Tensor, group: Group) -> None:
    """Sum a flat tensor over a group, in place; on gloo in rank order, equal on all ranks."""
    if get_pg_size(group) == 1:
        return
    if flat.numel() % get_pg_size(group) or not is_pairwise(group):
        dist.all_reduce(flat, group=group)
        return
    mesh = Mesh(replicate=group)
    Transfer(reduction_steps(flat, mesh, scale=1.0, tag=SUM_TAG)).finish()


def broadcast_from_first(copies: Sequence[tuple[Tensor, Group]]) -> None:
    """Overwrite each tensor by that of the first rank of its group."""
    handles = [
        dist.broadcast(tensor, global_rank(group, 0), group, async_op=True)
        for tensor, group in copies
        if get_pg_size(group) > 1
    ]
    for handle in handles:
        handle.wait()


def reduction_steps(
    bucket: Tensor,
    mesh: Mesh,
    *,
    scale: float,
    tag: int,
    average: bool = False,
    compression: Compression | None = None,
    place: SharedSlot | None = None,
    into: Tensor | None = None,
) -> SumSteps:
    """Sum a bucket of gradients over the mesh.

    Args:
        bucket: [n], n divisible by the mesh size. Afterwards it is undefined but for the sums.
        scale: factor on the sum.
        tag: tells the messages of different buckets apart.
        average: let the collective average over the ranks, where the backend can (`scale` then
            does not contain 1/size).
        compression: that of this bucket, step after step.
        place: of the bucket, if ranks of this machine can read it.
        into: [n / shard size], memory for the sums that are wanted elsewhere: used where that saves
            a copy.
    Returns:
        at its end, where the sum of this rank's shard over all ranks is: `mesh.own(bucket)`
        (without a shard axis the whole bucket), or `into`.
    Communication:
        a reduce-scatter on `mesh.shard`, then an all-reduce of the own shard on
        `mesh.replicate`; axes of size 1 cost nothing.
    """
    if compression is not None and compression.is_on(bucket, mesh):
        factor = scale / mesh.size if average else scale
        yield from compression.steps(bucket, mesh, factor, tag)
        return mesh.own(bucket)
    sizes = [(mesh.shard, mesh.shard_size), (mesh.replicate, mesh.replicate_size)]
    groups = [group for group, size in sizes if size > 1]
    if all(is_pairwise(group) for group in groups):
        factor = scale / mesh.size if average else scale
        # Both at the start: to share memory for the first time is a collective.
        shard, replicate = (
            select_transport(axis, tag, place) for axis in (mesh.shard, mesh.replicate)
        )
        is_sent_whole = isinstance(replicate, P2PTransport) and replicate.size == 2 == mesh.size
        if mesh.size == 1 or (is_sent_whole and not is_half(bucket)):
            if mesh.size == 2:
                yield [dist.all_reduce(bucket, group=mesh.replicate, async_op=True)]
            if factor != 1.0:
                bucket.mul_(factor)
            return bucket
        own = mesh.own(bucket)
        if replicate is not None:
            if shard is not None:
                yield from shard.reduce_scatter(bucket, 1.0)
            yield from replicate.reduce_scatter(own, factor)
            yield from replicate.gather_sums(own)
            return own
        assert shard is not None
        yield from shard.reduce_scatter(bucket, factor, into)
        return own if into is None else into
    if scale != 1.0:
        # Before the sum, so that half-precision sums over many ranks stay in range.
        bucket.mul_(scale)
    operation = dist.ReduceOp.AVG if average else dist.ReduceOp.SUM
    if mesh.shard_size > 1:
        own = mesh.own(bucket)
        yield [dist.reduce_scatter_tensor(own, bucket, operation, mesh.shard, async_op=True)]
        bucket = own
    if mesh.replicate_size > 1:
        yield [dist.all_reduce(bucket, operation, mesh.replicate, async_op=True)]
    return bucket


# Of a reduction of several steps, ranks reach the later ones in different orders. So these are
# messages with tags, or (on other backends) collectives that are begun and waited for at once.


def all_reduce_steps(flat: Tensor, group: Group, tag: int) -> Steps:
    """Sum a flat tensor, whose length the size of the group divides, in place."""
    if is_pairwise(group):
        way = P2PTransport(group, tag)
        yield from way.reduce_scatter(flat, 1.0)
        yield from way.gather_sums(flat)
    else:
        dist.all_reduce(flat, group=group)


def all_to_all_steps(sent: Tensor, received: Tensor, group: Group, tag: int) -> Steps:
    """Send piece i of a flat tensor to rank i; receive as much from each."""
    rank, size = get_pg_rank(group), get_pg_size(group)
    if not is_pairwise(group):
        dist.all_to_all_single(received, sent, group=group)
        return
    piece_of(received, rank, size).copy_(piece_of(sent, rank, size))
    others = [other for other in range(size) if other != rank]
    handles = [
        dist.irecv(piece_of(received, other, size), global_rank(group, other), group, tag)
        for other in others
    ]
    handles += [
        dist.isend(piece_of(sent, other, size), global_rank(group, other), group, tag)
        for other in others
    ]
    yield handles


def all_gather_steps(flat: Tensor, group: Group, tag: int) -> Steps:
    """Fill a flat tensor with every rank's piece of it, in place."""
    if is_pairwise(group):
        yield from P2PTransport(group, tag).gather_sums(flat)
    elif get_pg_size(group) > 1:
        own = piece_of(flat, get_pg_rank(group), get_pg_size(group))
        dist.all_gather_into_tensor(flat, own, group)
