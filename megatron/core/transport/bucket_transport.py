"""Reduce-scatter, all-reduce and all-gather of flat buckets, in steps.

Several buckets are in flight at a time, overlapping with each other and with the computation: each
operation is a generator that `Work` advances. All ranks of a group start the same operations in the
same order; messages of later steps are matched by tags.

Three transports: `P2PBucketTransport` (gloo: each rank receives the others' copies of the piece
that it will own and adds them in rank order; that moves the bytes of a ring, 2 (n-1)/n per element,
without the ring's copies), `ShmBucketTransport` (ranks of one machine read each other's buckets, in
the same order, hence with the same bits) and `NativeBucketTransport` (NCCL's own collectives).
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Protocol

import torch.distributed as dist
from torch import Tensor

from megatron.core.transport import backend
from megatron.core.transport.ordered_sum import is_half, ordered_sum, piece_of
from megatron.core.transport.shm.shm_bucket_transport import BucketSlot, ShmBucketTransport
from megatron.core.transport.work import Handle, Steps
from megatron.core.utils import get_pg_rank, get_pg_size

if TYPE_CHECKING:
    from megatron.core.process_groups_config import Group


class BucketTransport(Protocol):
    """How the ranks of a group reduce and gather one flat bucket [n]; their number divides n."""

    def reduce_scatter(
        self, bucket: Tensor, scale: float, into: Tensor | None = None
    ) -> Steps[Tensor]:
        """Compute scale * sum over the ranks of this rank's piece [n / size].

        Args:
            into: [n / size], memory for the sums that are wanted elsewhere; None is the piece.
        Returns:
            at its end, where the sums are: `into` where that saves a copy, or the own piece.
        """
        ...

    def all_reduce(self, bucket: Tensor, scale: float, *, is_first_step: bool) -> Steps[Tensor]:
        """Leave scale * sum over the ranks in `bucket` [n], and return it.

        Args:
            is_first_step: all ranks start it in the same order, as nothing came before.
        """
        ...

    def all_gather(self, bucket: Tensor, shard: Tensor) -> Steps[None]:
        """Fill `bucket`, in which this rank's piece is in place, with the shards of all ranks."""
        ...


class P2PBucketTransport:
    """Pieces travel as messages of the backend, matched by a tag."""

    def __init__(self, group: Group, tag: int) -> None:
        self.group, self.tag = group, tag
        self.rank, self.size = get_pg_rank(group), get_pg_size(group)
        self._others = [other for other in range(self.size) if other != self.rank]

    def reduce_scatter(
        self, bucket: Tensor, scale: float, into: Tensor | None = None
    ) -> Steps[Tensor]:
        """[n] -> [n / size]; see `BucketTransport`."""
        own = piece_of(bucket, self.rank, self.size)
        received = own.new_empty((self.size - 1, own.numel()))
        handles = self._receive(received[row] for row in range(self.size - 1))
        yield handles + self._send(piece_of(bucket, other, self.size) for other in self._others)
        terms = [*received[: self.rank], own, *received[self.rank :]]
        sums = own if into is None else into
        ordered_sum(terms, sums, scale)
        return sums

    def all_reduce(self, bucket: Tensor, scale: float, *, is_first_step: bool) -> Steps[Tensor]:
        """[n] -> [n]; see `BucketTransport`."""
        if is_first_step and self.size == 2 and not is_half(bucket):
            # a + b = b + a to the bit, and gloo's threads make progress without our help.
            yield [dist.all_reduce(bucket, group=self.group, async_op=True)]
            if scale != 1.0:
                bucket.mul_(scale)
            return bucket
        own = yield from self.reduce_scatter(bucket, scale)
        yield from self.all_gather(bucket, own)
        return bucket

    def all_gather(self, bucket: Tensor, shard: Tensor) -> Steps[None]:
        """See `BucketTransport`."""
        handles = self._receive(piece_of(bucket, other, self.size) for other in self._others)
        own = piece_of(bucket, self.rank, self.size)
        yield handles + self._send(own for _ in self._others)

    def all_to_all(self, sent: Tensor, received: Tensor) -> Steps[None]:
        """Send piece i of a flat tensor [n] to rank i; receive as much [n] from all."""
        piece_of(received, self.rank, self.size).copy_(piece_of(sent, self.rank, self.size))
        handles = self._receive(piece_of(received, other, self.size) for other in self._others)
        yield handles + self._send(piece_of(sent, other, self.size) for other in self._others)

    def _receive(self, pieces: Iterable[Tensor]) -> list[Handle]:
        return [
            backend.irecv(piece, other, self.group, self.tag)
            for piece, other in zip(pieces, self._others, strict=True)
        ]

    def _send(self, pieces: Iterable[Tensor]) -> list[Handle]:
        return [
            backend.isend(piece, other, self.group, self.tag)
            for piece, other in zip(pieces, self._others, strict=True)
        ]


class NativeBucketTransport:
    """The collectives of the backend, which has no tags: all ranks start them in one order.

    Args:
        averages: sums are averages over the ranks.
        blocks: wait at once. Of an operation of several steps, ranks reach the later ones in
            different orders, unless each step ends before anything else begins.
    """

    def __init__(self, group: Group, *, averages: bool = False, blocks: bool = False) -> None:
        self.group, self._starts = group, not blocks
        self.rank, self.size = get_pg_rank(group), get_pg_size(group)
        self._operation = dist.ReduceOp.AVG if averages else dist.ReduceOp.SUM

    def reduce_scatter(
        self, bucket: Tensor, scale: float, into: Tensor | None = None
    ) -> Steps[Tensor]:
        """[n] -> [n / size]; see `BucketTransport`."""
        self._scale(bucket, scale)
        own = piece_of(bucket, self.rank, self.size)
        yield from _in_flight(
            dist.reduce_scatter_tensor(own, bucket, self._operation, self.group, self._starts)
        )
        return own

    def all_reduce(self, bucket: Tensor, scale: float, *, is_first_step: bool) -> Steps[Tensor]:
        """[n] -> [n]; see `BucketTransport`."""
        self._scale(bucket, scale)
        yield from _in_flight(dist.all_reduce(bucket, self._operation, self.group, self._starts))
        return bucket

    def all_gather(self, bucket: Tensor, shard: Tensor) -> Steps[None]:
        """See `BucketTransport`."""
        own = piece_of(bucket, self.rank, self.size)
        yield from _in_flight(dist.all_gather_into_tensor(bucket, own, self.group, self._starts))

    def all_to_all(self, sent: Tensor, received: Tensor) -> Steps[None]:
        """Send piece i of a flat tensor [n] to rank i; receive as much [n] from all."""
        yield from _in_flight(
            dist.all_to_all_single(received, sent, group=self.group, async_op=self._starts)
        )

    @staticmethod
    def _scale(bucket: Tensor, scale: float) -> None:
        # Before the sum, so that half-precision sums over many ranks stay in range.
        if scale != 1.0:
            bucket.mul_(scale)


def select_bucket_transport(
    group: Group, tag: int, slot: BucketSlot | None, *, averages: bool = False
) -> BucketTransport | None:
    """Return how the ranks of `group` exchange a bucket; None for a single rank.

    Args:
        tag: tells the messages of different buckets apart, where the backend has tags.
        slot: of the bucket, if ranks of this machine can read it.
        averages: let the collective average over the ranks, where the backend can.
    Communication:
        that of `SharedBuffer.peers`.
    """
    if get_pg_size(group) == 1:
        return None
    assert group is not None
    if not has_tags(group):
        return NativeBucketTransport(group, averages=averages)
    peers = None if slot is None else slot.memory.peers(group)
    if slot is None or peers is None:
        return P2PBucketTransport(group, tag)
    return ShmBucketTransport(slot, peers)


def message_transport(group: Group, tag: int) -> P2PBucketTransport | NativeBucketTransport:
    """Return how the ranks of `group` exchange flat tensors in the later steps of an operation."""
    if has_tags(group):
        return P2PBucketTransport(group, tag)
    return NativeBucketTransport(group, blocks=True)


def has_tags(group: Group) -> bool:
    """Return whether the backend of `group` matches messages by tags (gloo does, NCCL does not)."""
    return dist.get_backend(group) == dist.Backend.GLOO


def _in_flight(work: dist.Work | None) -> Steps[None]:
    """Yield what was started; nothing if it has been waited for."""
    if work is not None:
        yield [work]
