"""Reduce-scatter and all-gather of flat tensors that other ranks of the machine read in place."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from torch import Tensor

from megatron.core.foundation.flight_recorder import recorded
from megatron.core.topology.group import Group
from megatron.core.transport.ordered_sum import STRETCH, ordered_sum, piece_of
from megatron.core.transport.shm.shared_buffer import PeerBuffers, SharedBuffer
from megatron.core.transport.work import Handle, Steps, Work

WINDOW = 16 * STRETCH
"""Elements that are mapped of another rank at a time."""


@dataclass(frozen=True)
class BucketSlot:
    """Where ranks of the same machine find a bucket (or shard) of this rank."""

    memory: SharedBuffer
    index: int
    """Of the progress counter of its communication."""
    keeps_pages: bool
    """What was read of others stays mapped: no page faults, but it counts as resident here too."""


class ShmBucketTransport:
    """Ranks publish when a bucket or shard may be read, and read those of the others in place.

    A rank's progress counter counts the steps that it has done; see `shared_buffer`.

    Args:
        group: of the ranks.
        tag: tells the operations of different buckets apart for the watchdog.
    """

    def __init__(self, slot: BucketSlot, peers: PeerBuffers, group: Group, tag: int = 0) -> None:
        self.group, self.tag = group, tag
        self._memory, self._index, self._peers = slot.memory, slot.index, peers
        self._base = slot.memory.begin(slot.index)
        self._keeps_pages = slot.keeps_pages

    @recorded("all_reduce")
    def all_reduce(self, x: Tensor, scale: float = 1.0) -> Work[Tensor]:
        """[t, ...] in place; see `Transport`."""
        return Work(self._all_reduce(x, scale))

    @recorded("reduce_scatter")
    def reduce_scatter(
        self, x: Tensor, scale: float = 1.0, *, out: Tensor | None = None
    ) -> Work[Tensor]:
        """[t, ...] -> [t/tp, ...]; see `Transport`."""
        size = self._peers.size
        sums = x.new_empty((x.shape[0] // size, *x.shape[1:])) if out is None else out
        return Work(self._reduce_scatter(x, scale, sums))

    @recorded("all_gather")
    def all_gather(self, x: Tensor, *, out: Tensor | None = None) -> Work[Tensor]:
        """[t/tp, ...] -> [t, ...]; see `Transport`. The others may read `x` afterwards still."""
        size = self._peers.size
        gathered = x.new_empty((x.shape[0] * size, *x.shape[1:])) if out is None else out
        return Work(self._all_gather(x, gathered))

    def _reduce_scatter(self, x: Tensor, scale: float, sums: Tensor) -> Steps[Tensor]:
        bucket = x.view(-1)
        yield self._publish(1, bucket)
        rank, size = self._peers.rank, self._peers.size
        own = piece_of(bucket, rank, size)
        first = rank * own.numel()
        for begin, part in _windows(own):
            terms = [
                part if peer == rank else self._read(peer, first + begin, part)
                for peer in range(size)
            ]
            ordered_sum(terms, sums.view(-1)[begin : begin + part.numel()], scale)
            for peer, term in enumerate(terms):
                self._unmap(peer, term)
        # The others' pieces of this bucket have been read when all have got here.
        yield self._publish(2, bucket)
        return sums

    def _all_reduce(self, x: Tensor, scale: float) -> Steps[Tensor]:
        bucket = x.view(-1)
        own = piece_of(bucket, self._peers.rank, self._peers.size)
        yield from self._reduce_scatter(bucket, scale, own)
        self._copy(bucket, are_shards=False)
        yield self._publish(3, bucket)
        return x

    def _all_gather(self, x: Tensor, gathered: Tensor) -> Steps[Tensor]:
        shard, bucket = x.view(-1), gathered.view(-1)
        own = piece_of(bucket, self._peers.rank, self._peers.size)
        if own.data_ptr() != shard.data_ptr():
            own.copy_(shard)
        yield self._publish(1, shard)
        self._copy(bucket, are_shards=True)
        self._memory.publish_progress(self._index, self._base + 2, shard)
        return gathered

    def _publish(self, step: int, shown: Tensor) -> Sequence[Handle]:
        self._memory.publish_progress(self._index, self._base + step, shown)
        return [self._peers.progress_of_others(self._index, self._base + step)]

    def _copy(self, bucket: Tensor, *, are_shards: bool) -> None:
        for peer in range(self._peers.size):
            if peer != self._peers.rank:
                piece = piece_of(bucket, peer, self._peers.size)
                first = 0 if are_shards else peer * piece.numel()
                for begin, part in _windows(piece):
                    theirs = self._read(peer, first + begin, part)
                    part.copy_(theirs)
                    self._unmap(peer, theirs)

    def _read(self, peer: int, begin: int, like: Tensor) -> Tensor:
        return self._peers.read(peer, self._index, begin, like)

    def _unmap(self, peer: int, theirs: Tensor) -> None:
        if peer != self._peers.rank and not self._keeps_pages:
            self._peers.unmap(peer, theirs)


def _windows(values: Tensor) -> Iterator[tuple[int, Tensor]]:
    """Yield (first element, part) of the parts of a flat tensor that are read at a time."""
    for begin in range(0, values.numel(), WINDOW):
        yield begin, values[begin : begin + WINDOW]
