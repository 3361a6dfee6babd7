"""Collectives on the rows of contiguous tensors through the shared slots of a group."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from megatron.core.transport.shm.shm_collectives import ShmGroup
from megatron.core.transport.tensor_transport import GlooTransport, Sizes
from megatron.core.transport.work import Work

if TYPE_CHECKING:
    from megatron.core.process_groups_config import Group


class ShmTransport(GlooTransport):
    """What is the same for all ranks goes through shared memory; sizes that differ through gloo."""

    def __init__(self, group: Group, shm: ShmGroup) -> None:
        super().__init__(group)
        self._shm = shm

    def all_reduce(self, x: Tensor) -> Work[Tensor]:
        """Sum [...]; see `TensorTransport`."""
        flat = x.view(-1)

        def add(part: slice, theirs: list[Tensor]) -> None:
            _ordered_sum(theirs, out=flat[part])

        return self._shm.exchange(x, add, x)

    def all_gather(self, x: Tensor, sizes: Sizes) -> Work[Tensor]:
        """[t/tp, ...] -> [t, ...]; see `TensorTransport`."""
        if sizes is not None:
            return super().all_gather(x, sizes)
        gathered = x.new_empty((x.shape[0] * self.size, *x.shape[1:]))
        rows = gathered.view(self.size, x.numel())

        def copy(part: slice, theirs: list[Tensor]) -> None:
            for row, piece in zip(rows, theirs, strict=True):
                row[part].copy_(piece)

        return self._shm.exchange(x, copy, gathered)

    def reduce_scatter(self, x: Tensor, sizes: Sizes) -> Work[Tensor]:
        """[t, ...] -> [t/tp, ...]; see `TensorTransport`."""
        if sizes is not None:
            return super().reduce_scatter(x, sizes)
        result = x.new_empty((x.shape[0] // self.size, *x.shape[1:]))
        own = result.view(-1)
        first = self.group.rank() * own.numel()

        def add_own(part: slice, theirs: list[Tensor]) -> None:
            low, high = max(part.start, first), min(part.stop, first + own.numel())
            if low < high:
                within = slice(low - part.start, high - part.start)
                _ordered_sum([t[within] for t in theirs], out=own[low - first : high - first])

        return self._shm.exchange(x, add_own, result)


def _ordered_sum(pieces: Sequence[Tensor], *, out: Tensor) -> None:
    """Add `pieces` into `out`, which may be none of them."""
    torch.add(pieces[0], pieces[1], out=out)
    for piece in pieces[2:]:
        out.add_(piece)
