"""Collectives on the rows of contiguous tensors through the shared slots of a group."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from megatron.core.foundation.flight_recorder import recorded
from megatron.core.topology.group import Group
from megatron.core.transport.shm.shm_collectives import ShmGroup
from megatron.core.transport.work import Work


class ShmTransport:
    """Ranks of one machine copy their tensors into slots that the others read."""

    def __init__(self, group: Group, shm: ShmGroup) -> None:
        self.group, self.size, self._shm = group, group.size(), shm

    @recorded("all_reduce")
    def all_reduce(self, x: Tensor, scale: float = 1.0) -> Work[Tensor]:
        """[t, ...] in place; see `Transport`."""
        flat = x.view(-1)

        def add(part: slice, theirs: list[Tensor]) -> None:
            _ordered_sum(theirs, scale, out=flat[part])

        return self._shm.exchange("all_reduce", x, add, x)

    @recorded("all_gather")
    def all_gather(self, x: Tensor, *, out: Tensor | None = None) -> Work[Tensor]:
        """[t/tp, ...] -> [t, ...]; see `Transport`."""
        gathered = x.new_empty((x.shape[0] * self.size, *x.shape[1:])) if out is None else out
        rows = gathered.view(self.size, x.numel())

        def copy(part: slice, theirs: list[Tensor]) -> None:
            for row, piece in zip(rows, theirs, strict=True):
                row[part].copy_(piece)

        return self._shm.exchange("all_gather", x, copy, gathered)

    @recorded("reduce_scatter")
    def reduce_scatter(
        self, x: Tensor, scale: float = 1.0, *, out: Tensor | None = None
    ) -> Work[Tensor]:
        """[t, ...] -> [t/tp, ...]; see `Transport`."""
        result = x.new_empty((x.shape[0] // self.size, *x.shape[1:])) if out is None else out
        own = result.view(-1)
        first = self.group.rank() * own.numel()

        def add_own(part: slice, theirs: list[Tensor]) -> None:
            low, high = max(part.start, first), min(part.stop, first + own.numel())
            if low < high:
                within = slice(low - part.start, high - part.start)
                sums = own[low - first : high - first]
                _ordered_sum([t[within] for t in theirs], scale, out=sums)

        return self._shm.exchange("reduce_scatter", x, add_own, result)


def _ordered_sum(pieces: Sequence[Tensor], scale: float, *, out: Tensor) -> None:
    """Leave scale * the sum of `pieces` in `out`, which may be none of them, in their dtype."""
    torch.add(pieces[0], pieces[1], out=out)
    for piece in pieces[2:]:
        out.add_(piece)
    if scale != 1.0:
        out.mul_(scale)
