"""Collectives of one group on contiguous tensors, in three implementations.

| transport | for | later steps of an operation |
|---|---|---|
| `NativeTransport` | accelerators: the collectives of the backend (NCCL) | none |
| `GlooTransport` | activations and weights on CPUs | in the order of the operations' starts |
| `MessageTransport` | buckets on CPUs, several in flight | matched by a message tag |

On CPUs sums over ranks are computed in rank order. The result has the same bits on all ranks, in
every bucket, with and without sharding.

Dimension 0 is split into one piece per rank, all of the same size. An operation starts at once.

Shapes: `t` rows of the full tensor; a slash divides by the size of the group.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import reduce
from typing import TypeGuard

import torch
import torch.distributed as dist
from torch import Tensor

from megatron.core.foundation.flight_recorder import recorded
from megatron.core.topology.group import Group
from megatron.core.transport import torch_collectives
from megatron.core.transport.work import Handle, Steps, Work

# torch 2.13 renamed these two functions; its old names warn, and older versions lack the new ones.
_all_gather_single = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_reduce_scatter_single = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor

Sizes = Sequence[int] | None
"""Rows of each rank; None: all have the same number."""
STRETCH = 1 << 16
"""Elements that `ordered_sum` adds, scales and writes at a time: they stay in the cache."""


def select_transport(x: Tensor, group: Group) -> NativeTransport:
    """Return the transport for activations and weights like `x` [...].

    All ranks start the operations of a group in the same order.
    """
    return GlooTransport(group) if x.is_cpu else NativeTransport(group)


def bucket_transport(
    group: Group, tag: int, *, averages: bool = False, is_in_order: bool = False
) -> MessageTransport | NativeTransport:
    """Return the transport for flat buckets; several may be in flight.

    Args:
        tag: separates the messages of different buckets, if the backend has tags.
        averages: the collective averages over the ranks, if the backend can.
        is_in_order: all ranks start the operations in the same order. This holds for the first
            step of a bucket; ranks reach later steps in different orders.
    """
    if has_tags(group):
        return MessageTransport(group, tag, is_in_order=is_in_order)
    return NativeTransport(group, averages=averages, blocks=not is_in_order)


def has_tags(group: Group) -> TypeGuard[dist.ProcessGroup]:
    """Return whether the backend of `group` matches messages by tags: gloo and MPI, not NCCL."""
    return isinstance(group, dist.ProcessGroup) and dist.get_backend(group) in (
        dist.Backend.GLOO,
        dist.Backend.MPI,
    )


class NativeTransport:
    """The collectives of the backend (NCCL).

    Args:
        averages: average over the ranks instead of adding.
        blocks: wait inside the call. Ranks reach the later steps of an operation in different
            orders, and NCCL matches collectives by their order: nothing else may start between.
    """

    def __init__(self, group: Group, *, averages: bool = False, blocks: bool = False) -> None:
        self.group, self.size, self._is_async = group, group.size(), not blocks
        self._operation = dist.ReduceOp.AVG if averages else dist.ReduceOp.SUM

    @recorded("all_reduce")
    def all_reduce(self, x: Tensor, scale: float = 1.0) -> Work[Tensor]:
        """Write scale * sum over the ranks to `x` [t, ...], and return `x`.

        `x` is scaled before the sum, so that half-precision sums stay in range.
        """
        if scale != 1.0:
            x.mul_(scale)
        return _until(dist.all_reduce(x, self._operation, self.group, self._is_async), x)

    @recorded("reduce_scatter")
    def reduce_scatter(
        self, x: Tensor, scale: float = 1.0, *, out: Tensor | None = None
    ) -> Work[Tensor]:
        """Return scale * sum over the ranks of this rank's piece: [t, ...] -> [t/tp, ...].

        Args:
            x: undefined afterwards if `scale` is not 1.
            out: receives the sums; it may be this rank's piece of `x`. None allocates it.
        """
        if scale != 1.0:
            x.mul_(scale)
        own = _own_piece_like(x, self.size) if out is None else out
        work = _reduce_scatter_single(
            own, x, op=self._operation, group=self.group, async_op=self._is_async
        )
        return _until(work, own)

    @recorded("all_gather")
    def all_gather(self, x: Tensor, *, out: Tensor | None = None) -> Work[Tensor]:
        """Return the pieces of all ranks in rank order: [t/tp, ...] -> [t, ...].

        Args:
            out: receives the pieces; `x` may be this rank's piece of it. None allocates it.
        """
        gathered = _gathered_like(x, self.size) if out is None else out
        work = _all_gather_single(gathered, x, group=self.group, async_op=self._is_async)
        return _until(work, gathered)

    @recorded("all_to_all")
    def all_to_all(self, x: Tensor, out: Tensor) -> Work[Tensor]:
        """Send piece i of `x` [t, ...] to rank i; receive the pieces for this rank into `out`."""
        work = dist.all_to_all_single(out, x, group=self.group, async_op=self._is_async)
        return _until(work, out)


class GlooTransport(NativeTransport):
    """Collectives on CPUs, with sums in rank order.

    gloo implements a reduce-scatter as an all-reduce; exchanging the pieces moves half the bytes.
    """

    def all_reduce(self, x: Tensor, scale: float = 1.0) -> Work[Tensor]:
        """Sum `x` [t, ...] in rank order; two ranks by gloo (a + b = b + a to the bit)."""
        return super().all_reduce(x, scale) if self.size <= 2 else self._start_all_reduce(x, scale)

    @recorded("all_reduce")
    def _start_all_reduce(self, x: Tensor, scale: float) -> Work[Tensor]:
        if scale != 1.0:
            x.mul_(scale)
        return Work(self._all_reduce(x))

    def _all_reduce(self, x: Tensor) -> Steps[Tensor]:
        flat = x.view(-1)
        padded = torch.nn.functional.pad(flat, (0, -flat.numel() % self.size))
        sums = yield from exchange_and_add(padded, self.group, padded.numel() // self.size)
        yield [_all_gather_single(padded, sums, group=self.group, async_op=True)]
        flat.copy_(padded[: flat.numel()])
        return x

    @recorded("reduce_scatter")
    def reduce_scatter(
        self, x: Tensor, scale: float = 1.0, *, out: Tensor | None = None
    ) -> Work[Tensor]:
        """Exchange the pieces, and add them here: [t, ...] -> [t/tp, ...]."""
        if scale != 1.0:
            x.mul_(scale)
        return exchange_and_add(x, self.group, x.shape[0] // self.size, out=out)


class MessageTransport:
    """Sends pieces of flat buckets as messages of gloo, matched by a tag.

    Each rank receives the other ranks' copies of the piece that it owns, and adds them in rank
    order: 2 (n-1)/n bytes per byte, as a ring, without the ring's copies.

    Args:
        is_in_order: all ranks start the operations in the same order.
    """

    def __init__(self, group: Group, tag: int, *, is_in_order: bool) -> None:
        self.group, self.tag, self._is_in_order = group, tag, is_in_order
        self.rank, self.size = group.rank(), group.size()
        self._others = [peer for peer in range(self.size) if peer != self.rank]

    @recorded("all_reduce")
    def all_reduce(self, x: Tensor, scale: float = 1.0) -> Work[Tensor]:
        """Add in rank order, then scale: [t, ...] in place."""
        return Work(self._all_reduce(x, scale))

    @recorded("reduce_scatter")
    def reduce_scatter(
        self, x: Tensor, scale: float = 1.0, *, out: Tensor | None = None
    ) -> Work[Tensor]:
        """Add in rank order, then scale: [t, ...] -> [t/tp, ...]."""
        own = _own_piece_like(x, self.size) if out is None else out
        return Work(self._reduce_scatter(x, scale, own))

    @recorded("all_gather")
    def all_gather(self, x: Tensor, *, out: Tensor | None = None) -> Work[Tensor]:
        """Gather [t/tp, ...] to [t, ...]."""
        return Work(self._all_gather(x, _gathered_like(x, self.size) if out is None else out))

    @recorded("all_to_all")
    def all_to_all(self, x: Tensor, out: Tensor) -> Work[Tensor]:
        """Send piece i of `x` [t, ...] to rank i; receive the pieces for this rank into `out`."""
        self._piece(out, self.rank).copy_(self._piece(x, self.rank))
        handles = self._receive(self._piece(out, peer) for peer in self._others)
        handles += self._send(self._piece(x, peer) for peer in self._others)
        return Work.of(handles, out)

    def _all_reduce(self, x: Tensor, scale: float) -> Steps[Tensor]:
        if self._is_in_order and self.size == 2 and not _is_half(x):
            # a + b = b + a to the bit, and gloo's threads make progress by themselves.
            yield [dist.all_reduce(x, group=self.group, async_op=True)]
            if scale != 1.0:
                x.mul_(scale)
            return x
        own = self._piece(x, self.rank)
        yield from self._reduce_scatter(x, scale, own)
        return (yield from self._all_gather(own, x))

    def _reduce_scatter(self, x: Tensor, scale: float, sums: Tensor) -> Steps[Tensor]:
        own = self._piece(x, self.rank)
        received = own.new_empty((self.size - 1, own.numel()))
        handles = self._receive(received)
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
            torch_collectives.irecv(piece, peer, self.group, self.tag)
            for piece, peer in zip(pieces, self._others, strict=True)
        ]

    def _send(self, pieces: Iterable[Tensor]) -> list[Handle]:
        return [
            torch_collectives.isend(piece, peer, self.group, self.tag)
            for piece, peer in zip(pieces, self._others, strict=True)
        ]


def exchange_and_add(
    x: Tensor,
    group: Group,
    num_own: int,
    sizes: Sequence[int] | None = None,
    *,
    out: Tensor | None = None,
) -> Work[Tensor]:
    """Exchange pieces of `x` [t, ...], and add in rank order the `num_own` rows of this rank.

    Args:
        sizes: rows of each rank's piece; equal if None.
    """
    size = group.size()
    received = x.new_empty((size * num_own, *x.shape[1:]))
    output_sizes, input_sizes = (None, None) if sizes is None else ([num_own] * size, list(sizes))

    def steps() -> Steps[Tensor]:
        yield [dist.all_to_all_single(received, x, output_sizes, input_sizes, group, async_op=True)]
        total = tree_sum(list(received.view(size, num_own, *x.shape[1:])))
        return total if out is None else out.copy_(total)

    return Work(steps())


@recorded("all_to_all", group_at=1)
def exchange(x: Tensor, group: Group, output_sizes: Sizes, input_sizes: Sizes) -> Work[Tensor]:
    """Send rows of `x` [t, ...] to every rank, and receive [t', ...] from all ranks."""
    num_received = x.shape[0] if output_sizes is None else sum(output_sizes)
    received = x.new_empty((num_received, *x.shape[1:]))
    into, out_of = (None if s is None else list(s) for s in (output_sizes, input_sizes))
    work = dist.all_to_all_single(received, x, into, out_of, group, async_op=True)
    return Work.of([work], received)


@recorded("all_to_all", group_at=1)
def all_gather_uneven(x: Tensor, group: Group, sizes: Sequence[int]) -> Work[Tensor]:
    """Gather `sizes[i]` rows of each rank i: [t_i, ...] -> [t, ...]."""
    if x.is_cpu:
        # gloo gathers equal pieces only; its all-to-all takes any sizes.
        copies = x.repeat(group.size(), *[1] * (x.dim() - 1))
        return exchange(copies, group, sizes, [x.shape[0]] * group.size())
    gathered = x.new_empty((sum(sizes), *x.shape[1:]))
    pieces = list(gathered.split(list(sizes)))
    return Work.of([dist.all_gather(pieces, x, group, async_op=True)], gathered)


@recorded("all_to_all", group_at=1)
def reduce_scatter_uneven(x: Tensor, group: Group, sizes: Sequence[int]) -> Work[Tensor]:
    """Sum x [t, ...]; rank i keeps `sizes[i]` rows [t_i, ...]."""
    return exchange_and_add(x, group, sizes[group.rank()], sizes)


@recorded("ring_shift", group_at=1)
def ring_shift(x: Tensor, group: Group) -> Work[Tensor]:
    """Start to send `x` [...] to the next rank of `group`, and to receive a tensor like it from the
    previous rank; `x` may be overwritten after the work has ended."""
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
    """Keep `_sent` alive until it has been sent."""
    yield works
    return received


def tree_sum(terms: Iterable[Tensor]) -> Tensor:
    """Add tensors [...] in a binary tree over their numbers; they may be overwritten.

    Terms that an iterator computes are added while they are in the cache.
    """
    subtrees: list[Tensor] = []
    for number, term in enumerate(terms):
        while number % 2:
            term, number = subtrees.pop().add_(term), number // 2
        subtrees.append(term)
    return reduce(lambda right, left: left.add_(right), reversed(subtrees))


def piece_of(bucket: Tensor, rank: int, size: int) -> Tensor:
    """Return piece `rank` of `size` equal pieces [n / size] of a flat tensor [n], as a view."""
    length = bucket.numel() // size
    return bucket[rank * length : (rank + 1) * length]


def ordered_sum(terms: Sequence[Tensor], sums: Tensor, scale: float) -> None:
    """Write scale * (t0 + t1 + ...) to `sums`, which may be one of `terms`.

    Half precision is added in fp32.

    Args:
        terms: each [n].
        sums: [n].
    """
    for begin in range(0, sums.numel(), STRETCH):
        parts = [term[begin : begin + STRETCH] for term in terms]
        out = sums[begin : begin + STRETCH]
        if _is_half(sums):
            total = parts[0].float()
            for part in parts[1:]:
                total += part
            out.copy_(total.mul_(scale))
            continue
        # Only the last sum is written to `out`: if `out` is a term, it has been read by then.
        total = parts[0]
        between = torch.empty_like(out) if len(parts) > 2 else None
        for part in parts[1:-1]:
            total = torch.add(total, part, out=between)
        torch.add(total, parts[-1], out=out)
        if scale != 1.0:
            out.mul_(scale)


def averages(group: Group) -> bool:
    """Return whether a reduce-scatter with `ReduceOp.AVG` over `group` returns the mean.

    gloo of torch 2.7 silently returns the sum, and FSDP2 relies on the mean.

    Communication:
        a reduce-scatter of one element per rank.
    """
    if not torch_collectives.has_peers(group):
        return True
    mean = torch.empty(1, device=torch_collectives.tensor_device(group))
    ones = torch.ones(group.size(), device=mean.device)
    _reduce_scatter_single(mean, ones, op=dist.ReduceOp.AVG, group=group)
    return mean.item() == 1


def _is_half(tensor: Tensor) -> bool:
    return tensor.dtype in (torch.bfloat16, torch.float16)


def _own_piece_like(x: Tensor, size: int) -> Tensor:
    return x.new_empty((x.shape[0] // size, *x.shape[1:]))


def _gathered_like(x: Tensor, size: int) -> Tensor:
    return x.new_empty((x.shape[0] * size, *x.shape[1:]))


def _until(handle: dist.Work | None, result: Tensor) -> Work[Tensor]:
    """Return the work that ends with `handle`; with None it has already ended."""
    return Work.completed(result) if handle is None else Work.of([handle], result)
