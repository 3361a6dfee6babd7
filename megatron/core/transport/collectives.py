"""Collectives between the ranks of a group, without autograd: the best algorithm of each backend.

Everything here works on dimension 0 ("rows") of contiguous tensors; `tensor_parallel.mappings` puts
autograd and other dimensions on top. On a CPU, ranks of one machine exchange through shared memory
(`transport.shm.shm_collectives`); everything else goes through the group's backend. Sums are
computed in a fixed order, so all ranks of a group hold the same bits: replicated weights stay equal
without ever being compared.

Shapes: `t` rows of the full tensor, a slash divides by the size of the group.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor

from megatron.core.errors import TopologyError
from megatron.core.transport.shm.shm_collectives import ShmGroup, Transfer, open_shm_group

if TYPE_CHECKING:
    from megatron.core.process_groups_config import Group

# torch 2.13 renamed the two; the old names warn there, the new ones are absent before.
_all_gather_single = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_reduce_scatter_single = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


class PendingTensor:
    """The result of a collective that may still be under way; `wait()` returns it, once."""

    def __init__(
        self, work: Any, result: Tensor, finish: Callable[[Tensor], Tensor] | None = None
    ) -> None:
        self._work = work
        self._result = result
        self._finish = finish

    @property
    def unfinished(self) -> Tensor:
        """The tensor in which the result will be: until `wait()` its numbers mean nothing."""
        return self._result

    def wait(self) -> Tensor:
        """Return the result; on an accelerator only the stream waits, not the host."""
        if self._work is not None:
            self._work.wait()
        return self._result if self._finish is None else self._finish(self._result)


def all_reduce(x: Tensor, group: Group) -> Tensor:
    """Sum `x` [...] over `group` in place and return it."""
    return start_all_reduce(x, group).wait()


def start_all_reduce(x: Tensor, group: Group) -> PendingTensor:
    """Begin to sum contiguous `x` [...] over `group` in place; leave it alone until `wait()`."""
    shared = _shared_memory(x, group)
    if shared is not None:
        flat = x.view(-1)

        def add(part: slice, theirs: list[Tensor]) -> None:
            _ordered_sum(theirs, out=flat[part])

        return PendingTensor(Transfer(shared, x, add), x)
    return PendingTensor(dist.all_reduce(x, group=group, async_op=True), x)


def start_all_gather(x: Tensor, group: Group) -> PendingTensor:
    """Begin to collect equal pieces [t/tp, ...] to [t, ...], in rank order."""
    x, size = x.contiguous(), group.size()
    gathered = x.new_empty((x.shape[0] * size, *x.shape[1:]))
    shared = _shared_memory(x, group)
    if shared is not None:
        rows = gathered.view(size, x.numel())

        def place(part: slice, theirs: list[Tensor]) -> None:
            for row, piece in zip(rows, theirs, strict=True):
                row[part].copy_(piece)

        return PendingTensor(Transfer(shared, x, place), gathered)
    return PendingTensor(_all_gather_single(gathered, x, group=group, async_op=True), gathered)


def all_gather(x: Tensor, group: Group, sizes: Sequence[int] | None = None) -> Tensor:
    """Collect pieces [t/tp, ...] of all ranks to [t, ...], in rank order.

    Args:
        sizes: rows of each rank's piece, where they are not all equal.
    """
    if sizes is None:
        return start_all_gather(x, group).wait()
    gathered = x.new_empty((sum(sizes), *x.shape[1:]))
    if x.is_cpu:
        # gloo gathers equal pieces only; its all-to-all takes any sizes.
        copies = x.repeat(group.size(), *[1] * (x.dim() - 1))
        dist.all_to_all_single(
            gathered, copies, list(sizes), [x.shape[0]] * group.size(), group=group
        )
    else:
        dist.all_gather(list(gathered.split(list(sizes))), x.contiguous(), group=group)
    return gathered


def start_reduce_scatter(x: Tensor, group: Group) -> PendingTensor:
    """Begin to sum [t, ...] over `group`, each rank keeping its equal piece [t/tp, ...]."""
    x, size = x.contiguous(), group.size()
    if x.shape[0] % size:
        raise TopologyError(
            f"{x.shape[0]} rows cannot be split over {size} ranks.",
            rule="a reduce-scatter leaves the same number of rows on every rank",
            fix="pad the sequence to a multiple of the ranks",
        )
    shared = _shared_memory(x, group)
    if shared is not None:
        result = x.new_empty((x.shape[0] // size, *x.shape[1:]))
        own = result.view(-1)
        first = group.rank() * own.numel()

        def add_own(part: slice, theirs: list[Tensor]) -> None:
            low, high = max(part.start, first), min(part.stop, first + own.numel())
            if low < high:
                within = slice(low - part.start, high - part.start)
                _ordered_sum([t[within] for t in theirs], out=own[low - first : high - first])

        return PendingTensor(Transfer(shared, x, add_own), result)
    if x.is_cpu:
        # gloo forms a reduce-scatter from an all-reduce, which moves twice the bytes. Exchanging
        # the pieces and adding them here, in rank order, moves the least.
        pieces = torch.empty_like(x)
        work = dist.all_to_all_single(pieces, x, group=group, async_op=True)
        return PendingTensor(work, pieces, lambda y: _sum_pieces(y.view(size, -1, *y.shape[1:])))
    result = x.new_empty((x.shape[0] // size, *x.shape[1:]))
    return PendingTensor(_reduce_scatter_single(result, x, group=group, async_op=True), result)


def reduce_scatter(x: Tensor, group: Group, sizes: Sequence[int] | None = None) -> Tensor:
    """Sum [t, ...] over `group`, each rank keeping its piece [t/tp, ...].

    Args:
        sizes: rows that each rank keeps, where they are not all equal.
    """
    if sizes is None:
        return start_reduce_scatter(x, group).wait()
    rank, size = group.rank(), group.size()
    own = sizes[rank]
    pieces = x.new_empty((size * own, *x.shape[1:]))
    dist.all_to_all_single(pieces, x.contiguous(), [own] * size, list(sizes), group=group)
    return _sum_pieces(pieces.view(size, own, *x.shape[1:]))


def _shared_memory(x: Tensor, group: Group) -> ShmGroup | None:
    """Return the memory that the ranks of `group` share, where they and `x` are on one machine."""
    return open_shm_group(group) if x.is_cpu and group.size() > 1 else None


def _ordered_sum(pieces: Sequence[Tensor], *, out: Tensor) -> None:
    """Add `pieces` into `out`, which may be none of them."""
    torch.add(pieces[0], pieces[1], out=out)
    for piece in pieces[2:]:
        out.add_(piece)


def _sum_pieces(pieces: Tensor) -> Tensor:
    """Add the pieces [tp, ...] of all ranks. Two need no reduction kernel."""
    return pieces[0] + pieces[1] if pieces.shape[0] == 2 else pieces.sum(0)


def all_to_all(
    x: Tensor,
    group: Group,
    output_sizes: Sequence[int] | None = None,
    input_sizes: Sequence[int] | None = None,
) -> Tensor:
    """Send piece i of `x` [t, ...] to rank i; join the pieces received, in rank order.

    Args:
        output_sizes, input_sizes: rows received from and sent to each rank; equal if None.
    """
    return start_all_to_all(x, group, output_sizes, input_sizes).wait()


def start_all_to_all(
    x: Tensor,
    group: Group,
    output_sizes: Sequence[int] | None = None,
    input_sizes: Sequence[int] | None = None,
) -> PendingTensor:
    """Begin what `all_to_all` does; leave `x` [t, ...] alone until `wait()`."""
    x = x.contiguous()
    rows = x.shape[0] if output_sizes is None else sum(output_sizes)
    received = x.new_empty((rows, *x.shape[1:]))
    work = dist.all_to_all_single(
        received,
        x,
        None if output_sizes is None else list(output_sizes),
        None if input_sizes is None else list(input_sizes),
        group=group,
        async_op=True,
    )
    return PendingTensor(work, received)


def broadcast(x: Tensor, group: Group) -> Tensor:
    """Copy `x` [...] of the group's first rank into `x` of the others, in place, and return it."""
    dist.broadcast(x, group=group, group_src=0)
    return x
