"""Transports through a backend of torch.distributed; `transport.Transport` says what each does.

Shapes: `t` rows of the full tensor, a slash divides by the size of the group.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from megatron.core.foundation.flight_recorder import recorded
from megatron.core.topology.group import Group
from megatron.core.transport import backend
from megatron.core.transport.ordered_sum import is_half, ordered_sum, piece_of
from megatron.core.transport.work import Handle, Steps, Work

# torch 2.13 renamed the two; the old names warn there, the new ones are absent before.
_all_gather_single = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_reduce_scatter_single = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor

Sizes = Sequence[int] | None


class NativeTransport:
    """The collectives of the backend (NCCL), which all ranks start in one order.

    Args:
        averages: sums are averages over the ranks.
        blocks: wait at once. Of an operation of several steps, ranks reach the later ones in
            different orders, unless each step ends before anything else begins.
    """

    def __init__(self, group: Group, *, averages: bool = False, blocks: bool = False) -> None:
        self.group, self.size, self._starts = group, group.size(), not blocks
        self._operation = dist.ReduceOp.AVG if averages else dist.ReduceOp.SUM

    @recorded("all_reduce")
    def all_reduce(self, x: Tensor, scale: float = 1.0) -> Work[Tensor]:
        """[t, ...] in place; see `Transport`."""
        _scale(x, scale)
        return _until(dist.all_reduce(x, self._operation, self.group, self._starts), x)

    @recorded("reduce_scatter")
    def reduce_scatter(
        self, x: Tensor, scale: float = 1.0, *, out: Tensor | None = None
    ) -> Work[Tensor]:
        """[t, ...] -> [t/tp, ...]; see `Transport`."""
        _scale(x, scale)
        own = x.new_empty((x.shape[0] // self.size, *x.shape[1:])) if out is None else out
        work = _reduce_scatter_single(
            own, x, op=self._operation, group=self.group, async_op=self._starts
        )
        return _until(work, own)

    @recorded("all_gather")
    def all_gather(self, x: Tensor, *, out: Tensor | None = None) -> Work[Tensor]:
        """[t/tp, ...] -> [t, ...]; see `Transport`."""
        gathered = x.new_empty((x.shape[0] * self.size, *x.shape[1:])) if out is None else out
        work = _all_gather_single(gathered, x, group=self.group, async_op=self._starts)
        return _until(work, gathered)

    @recorded("all_to_all")
    def all_to_all(self, x: Tensor, out: Tensor) -> Work[Tensor]:
        """Send piece i of `x` [t, ...] to rank i; receive as much from all into `out`."""
        work = dist.all_to_all_single(out, x, group=self.group, async_op=self._starts)
        return _until(work, out)


class GlooTransport(NativeTransport):
    """The same on a CPU, where gloo makes a reduce-scatter of an all-reduce."""

    @recorded("reduce_scatter")
    def reduce_scatter(
        self, x: Tensor, scale: float = 1.0, *, out: Tensor | None = None
    ) -> Work[Tensor]:
        """[t, ...] -> [t/tp, ...]; see `Transport`.

        Exchanging the pieces and adding them here moves half of what gloo's all-reduce does.
        """
        _scale(x, scale)
        return _sum_of_pieces(x, x.shape[0] // self.size, None, self.group, out)


class MessageTransport:
    """Pieces travel as messages of gloo, matched by a tag.

    Each rank receives the others' copies of the piece that it owns and adds them in rank order:
    the bytes of a ring, 2 (n-1)/n per element, without the ring's copies.

    Args:
        is_in_order: all ranks start the operations in one order.
    """

    def __init__(self, group: Group, tag: int, *, is_in_order: bool) -> None:
        self.group, self.tag, self._is_in_order = group, tag, is_in_order
        self.rank, self.size = group.rank(), group.size()
        self._others = [peer for peer in range(self.size) if peer != self.rank]

    @recorded("all_reduce")
    def all_reduce(self, x: Tensor, scale: float = 1.0) -> Work[Tensor]:
        """[t, ...] in place; see `Transport`."""
        return Work(self._all_reduce(x, scale))

    @recorded("reduce_scatter")
    def reduce_scatter(
        self, x: Tensor, scale: float = 1.0, *, out: Tensor | None = None
    ) -> Work[Tensor]:
        """[t, ...] -> [t/tp, ...]; see `Transport`."""
        sums = x.new_empty((x.shape[0] // self.size, *x.shape[1:])) if out is None else out
        return Work(self._reduce_scatter(x, scale, sums))

    @recorded("all_gather")
    def all_gather(self, x: Tensor, *, out: Tensor | None = None) -> Work[Tensor]:
        """[t/tp, ...] -> [t, ...]; see `Transport`."""
        gathered = x.new_empty((x.shape[0] * self.size, *x.shape[1:])) if out is None else out
        return Work(self._all_gather(x, gathered))

    @recorded("all_to_all")
    def all_to_all(self, x: Tensor, out: Tensor) -> Work[Tensor]:
        """Send piece i of `x` [t, ...] to rank i; receive as much from all into `out`."""
        self._piece(out, self.rank).copy_(self._piece(x, self.rank))
        handles = self._receive(self._piece(out, peer) for peer in self._others)
        handles += self._send(self._piece(x, peer) for peer in self._others)
        return Work.of(handles, out)

    def _all_reduce(self, x: Tensor, scale: float) -> Steps[Tensor]:
        if self._is_in_order and self.size == 2 and not is_half(x):
            # a + b = b + a to the bit, and gloo's threads make progress without our help.
            yield [dist.all_reduce(x, group=self.group, async_op=True)]
            _scale(x, scale)
            return x
        own = self._piece(x, self.rank)
        yield from self._reduce_scatter(x, scale, own)
        return (yield from self._all_gather(own, x))

    def _reduce_scatter(self, x: Tensor, scale: float, sums: Tensor) -> Steps[Tensor]:
        own = self._piece(x, self.rank)
        received = own.new_empty((self.size - 1, own.numel()))
        handles = self._receive(received[row] for row in range(self.size - 1))
        yield handles + self._send(self._piece(x, peer) for peer in self._others)
        terms = [*received[: self.rank], own, *received[self.rank :]]
        ordered_sum(terms, sums.view(-1), scale)
        return sums

    def _all_gather(self, x: Tensor, gathered: Tensor) -> Steps[Tensor]:
        own = self._piece(gathered, self.rank)
        if own.data_ptr() != x.data_ptr():
            own.copy_(x.view(-1))
        handles = self._receive(self._piece(gathered, peer) for peer in self._others)
        yield handles + self._send(own for _ in self._others)
        return gathered

    def _piece(self, x: Tensor, rank: int) -> Tensor:
        return piece_of(x.view(-1), rank, self.size)

    def _receive(self, pieces: Iterable[Tensor]) -> list[Handle]:
        return [
            backend.irecv(piece, peer, self.group, self.tag)
            for piece, peer in zip(pieces, self._others, strict=True)
        ]

    def _send(self, pieces: Iterable[Tensor]) -> list[Handle]:
        return [
            backend.isend(piece, peer, self.group, self.tag)
            for piece, peer in zip(pieces, self._others, strict=True)
        ]


# What is the same on all transports: pieces of different sizes, and messages to one rank.


@recorded("all_to_all", group_at=1)
def all_gather_uneven(x: Tensor, group: Group, sizes: Sequence[int]) -> Work[Tensor]:
    """Start to collect `sizes[i]` rows of each rank i: [t_i, ...] -> [t, ...]."""
    if x.is_cpu:
        # gloo gathers equal pieces only; its all-to-all takes any sizes.
        copies = x.repeat(group.size(), *[1] * (x.dim() - 1))
        return all_to_all(copies, group, sizes, [x.shape[0]] * group.size())
    gathered = x.new_empty((sum(sizes), *x.shape[1:]))
    pieces = list(gathered.split(list(sizes)))
    return Work.of([dist.all_gather(pieces, x, group, async_op=True)], gathered)


@recorded("all_to_all", group_at=1)
def reduce_scatter_uneven(x: Tensor, group: Group, sizes: Sequence[int]) -> Work[Tensor]:
    """Start to sum x [t, ...]; rank i keeps `sizes[i]` rows [t_i, ...]."""
    return _sum_of_pieces(x, sizes[group.rank()], list(sizes), group, None)


@recorded("all_to_all", group_at=1)
def all_to_all(
    x: Tensor, group: Group, output_sizes: Sizes = None, input_sizes: Sizes = None
) -> Work[Tensor]:
    """Start to send rows of `x` [t, ...] to every rank, and to receive [t', ...] from all.

    Args:
        output_sizes, input_sizes: rows received from and sent to each rank; equal if None.
    """
    rows = x.shape[0] if output_sizes is None else sum(output_sizes)
    received = x.new_empty((rows, *x.shape[1:]))
    into, out_of = (None if s is None else list(s) for s in (output_sizes, input_sizes))
    work = dist.all_to_all_single(received, x, into, out_of, group, async_op=True)
    return Work.of([work], received)


@recorded("ring_shift", group_at=1)
def ring_shift(x: Tensor, group: Group) -> Work[Tensor]:
    """Start to send `x` [...] to the next rank, and to receive as much from the one before."""
    assert isinstance(group, dist.ProcessGroup), "a ring has more than one rank"
    rank, received = group.rank(), torch.empty_like(x)
    following = dist.get_global_rank(group, (rank + 1) % group.size())
    preceding = dist.get_global_rank(group, (rank - 1) % group.size())
    # One batch: separate calls deadlock on NCCL when every rank sends first.
    works = dist.batch_isend_irecv(
        [
            dist.P2POp(dist.isend, x, following, group),
            dist.P2POp(dist.irecv, received, preceding, group),
        ]
    )
    return Work(_until_received(works, x, received))


def _until_received(works: Sequence[Handle], _sent: Tensor, received: Tensor) -> Steps[Tensor]:
    """Keep `_sent` alive until it has left."""
    yield works
    return received


def _sum_of_pieces(
    x: Tensor, own: int, sizes: list[int] | None, group: Group, out: Tensor | None
) -> Work[Tensor]:
    """Exchange the pieces, of which this rank keeps `own` rows, and add them in rank order."""
    size = group.size()
    pieces = x.new_empty((size * own, *x.shape[1:]))
    received = None if sizes is None else [own] * size

    def steps() -> Steps[Tensor]:
        yield [dist.all_to_all_single(pieces, x, received, sizes, group, async_op=True)]
        by_rank = pieces.view(size, own, *x.shape[1:])
        if size == 2:  # needs no reduction kernel
            return torch.add(by_rank[0], by_rank[1], out=out)
        return torch.sum(by_rank, 0, out=out)

    return Work(steps())


def _scale(x: Tensor, scale: float) -> None:
    # Before a sum of the backend, so that half-precision sums over many ranks stay in range.
    if scale != 1.0:
        x.mul_(scale)


def _until(handle: dist.Work | None, result: Tensor) -> Work[Tensor]:
    """Return the work that ends with `handle`; None has ended."""
    return Work.completed(result) if handle is None else Work.of([handle], result)


def averages(group: Group) -> bool:
    """Return whether a reduce-scatter over `group` that is asked for the mean returns it.

    gloo of torch 2.7 returns the sum without a word, and FSDP2 asks for the mean.

    Communication:
        a reduce-scatter of one element per rank.
    """
    if not backend.has_peers(group):
        return True
    mean = torch.empty(1, device=backend.tensor_device(group))
    ones = torch.ones(group.size(), device=mean.device)
    _reduce_scatter_single(mean, ones, op=dist.ReduceOp.AVG, group=group)
    return mean.item() == 1
