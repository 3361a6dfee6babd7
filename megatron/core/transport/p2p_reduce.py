"""Reduce-scatter and all-gather of flat tensors in rank order, in steps.

A flat tensor has one piece per rank. There are two transports, with the same bits: `P2PTransport`
between any ranks, and `ShmTransport` between ranks that map each other's memory. Both work in
steps, so that several of them overlap with each other and with the computation.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor

from megatron.core.transport.shm.shared_buffer import PeerBuffers, SharedBuffer
from megatron.core.utils import get_pg_rank, get_pg_size

if TYPE_CHECKING:
    from megatron.core.process_groups_config import Group

STRETCH = 1 << 16
"""Elements that are added, scaled and written before the next ones: they stay in the cache."""
WINDOW = 16 * STRETCH
"""Elements that are mapped of another rank at a time."""

Steps = Iterator[Sequence[Any]]
"""Yields lists of handles with `wait()`; continued after they were waited for."""


@dataclass(frozen=True)
class SharedSlot:
    """Where ranks of the same machine find a bucket (or shard) of this rank."""

    memory: SharedBuffer
    index: int
    """Of the word that says how far its communication is."""
    keeps_pages: bool
    """What was read of others stays mapped: no page faults, but it counts as resident here too."""


def piece_of(bucket: Tensor, rank: int, size: int) -> Tensor:
    """Return the rank-th of `size` equal pieces [n/size] of `bucket` [n], as a view."""
    length = bucket.numel() // size
    return bucket[rank * length : (rank + 1) * length]


def ordered_sum(terms: Sequence[Tensor], sums: Tensor, scale: float) -> None:
    """Leave scale * (t0 + t1 + ...) in `sums`, which may be one of `terms`.

    Half precision is added in fp32.
    """
    for begin in range(0, sums.numel(), STRETCH):
        parts = [term[begin : begin + STRETCH] for term in terms]
        out = sums[begin : begin + STRETCH]
        if is_half(sums):
            total = parts[0].float()
            for part in parts[1:]:
                total += part
            out.copy_(total.mul_(scale))
            continue
        # Only the last sum lands in `out`: a term that lies there is read before or then.
        total = parts[0]
        between = torch.empty_like(out) if len(parts) > 2 else None
        for part in parts[1:-1]:
            total = torch.add(total, part, out=between)
        torch.add(total, parts[-1], out=out)
        if scale != 1.0:
            out.mul_(scale)


class P2PTransport:
    """Pieces travel as messages of the backend, told apart by a tag."""

    def __init__(self, group: Group, tag: int) -> None:
        self.group, self.tag = group, tag
        self.rank, self.size = get_pg_rank(group), get_pg_size(group)
        self._others = [other for other in range(self.size) if other != self.rank]

    def reduce_scatter(self, bucket: Tensor, scale: float, into: Tensor | None = None) -> Steps:
        """Leave scale * sum over the ranks in `into`, or in this rank's piece of `bucket`."""
        own = piece_of(bucket, self.rank, self.size)
        received = own.new_empty((self.size - 1, own.numel()))
        handles = self._receive(received[row] for row in range(self.size - 1))
        yield handles + self._send(piece_of(bucket, other, self.size) for other in self._others)
        terms = [*received[: self.rank], own, *received[self.rank :]]
        ordered_sum(terms, own if into is None else into, scale)

    def gather_sums(self, bucket: Tensor) -> Steps:
        """After `reduce_scatter`: fill `bucket` with the sums of all ranks."""
        handles = self._receive(piece_of(bucket, other, self.size) for other in self._others)
        own = piece_of(bucket, self.rank, self.size)
        yield handles + self._send(own for _ in self._others)

    def gather(self, bucket: Tensor, _shard: Tensor) -> Steps:
        """Fill `bucket`, in which this rank's piece is in place, with the shards of all ranks."""
        yield from self.gather_sums(bucket)

    def _receive(self, places: Iterable[Tensor]) -> list[Any]:
        return [
            dist.irecv(place, global_rank(self.group, other), self.group, self.tag)
            for place, other in zip(places, self._others, strict=True)
        ]

    def _send(self, pieces: Iterable[Tensor]) -> list[Any]:
        return [
            dist.isend(piece, global_rank(self.group, other), self.group, self.tag)
            for piece, other in zip(pieces, self._others, strict=True)
        ]


class ShmTransport:
    """Ranks publish when a bucket or shard may be read, and read those of the others in place.

    A rank's progress counter counts the steps that it has done; see `transport.shm.shared_buffer`.
    """

    def __init__(self, place: SharedSlot, peers: PeerBuffers) -> None:
        self._memory, self._index, self._peers = place.memory, place.index, peers
        self._base = place.memory.begin(place.index)
        self._keeps_pages = place.keeps_pages

    def reduce_scatter(self, bucket: Tensor, scale: float, into: Tensor | None = None) -> Steps:
        """Leave scale * sum over the ranks in `into`, or in this rank's piece of `bucket`."""
        yield self._come_to(1, bucket)
        rank, size = self._peers.rank, self._peers.size
        own = piece_of(bucket, rank, size)
        first = rank * own.numel()
        for begin, part in _windows(own):
            terms = [
                part if other == rank else self._read(other, first + begin, part)
                for other in range(size)
            ]
            sums = part if into is None else into[begin : begin + part.numel()]
            ordered_sum(terms, sums, scale)
            for other, term in enumerate(terms):
                self._forget(other, term)
        # The others' pieces of this bucket have been read when all have come.
        yield self._come_to(2, bucket)

    def gather_sums(self, bucket: Tensor) -> Steps:
        """After `reduce_scatter`: fill `bucket` with the sums of all ranks."""
        self._copy(bucket, are_shards=False)
        yield self._come_to(3, bucket)

    def gather(self, bucket: Tensor, shard: Tensor) -> Steps:
        """Fill `bucket`, in which this rank's piece is in place, with the shards of all ranks.

        The others may still be reading `shard` afterwards.
        """
        yield self._come_to(1, shard)
        self._copy(bucket, are_shards=True)
        self._memory.publish_progress(self._index, self._base + 2, shard)

    def _come_to(self, step: int, shown: Tensor) -> list[Any]:
        self._memory.publish_progress(self._index, self._base + step, shown)
        return [self._peers.progress_of_others(self._index, self._base + step)]

    def _copy(self, bucket: Tensor, *, are_shards: bool) -> None:
        for other in range(self._peers.size):
            if other != self._peers.rank:
                piece = piece_of(bucket, other, self._peers.size)
                first = 0 if are_shards else other * piece.numel()
                for begin, part in _windows(piece):
                    theirs = self._read(other, first + begin, part)
                    part.copy_(theirs)
                    self._forget(other, theirs)

    def _read(self, other: int, begin: int, like: Tensor) -> Tensor:
        return self._peers.read(other, self._index, begin, like)

    def _forget(self, other: int, theirs: Tensor) -> None:
        if other != self._peers.rank and not self._keeps_pages:
            self._peers.unmap(other, theirs)


def _windows(values: Tensor) -> Iterator[tuple[int, Tensor]]:
    """Yield (first element, part) of the parts of a flat tensor that are read at a time."""
    for begin in range(0, values.numel(), WINDOW):
        yield begin, values[begin : begin + WINDOW]


def select_transport(
    group: Group, tag: int, place: SharedSlot | None
) -> P2PTransport | ShmTransport | None:
    """Return how the ranks of `group` exchange pieces; None for a single rank.

    Communication: that of `SharedBuffer.peers`.
    """
    if get_pg_size(group) == 1:
        return None
    assert group is not None
    peers = None if place is None else place.memory.peers(group)
    if place is None or peers is None:
        return P2PTransport(group, tag)
    return ShmTransport(place, peers)


def is_half(tensor: Tensor) -> bool:
    return tensor.dtype in (torch.bfloat16, torch.float16)


def is_pairwise(group: Group) -> bool:
    return dist.get_backend(group) == dist.Backend.GLOO


def global_rank(group: Group, group_rank: int) -> int:
    return dist.get_global_rank(group, group_rank)
