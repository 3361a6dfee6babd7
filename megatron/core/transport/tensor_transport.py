"""Collectives on the rows of contiguous tensors through a backend of torch.distributed.

Shapes: `t` rows of the full tensor, a slash divides by the size of the group.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from megatron.core.transport.work import Handle, Steps, Work

if TYPE_CHECKING:
    from megatron.core.process_groups_config import Group

# torch 2.13 renamed the two; the old names warn there, the new ones are absent before.
_all_gather_single = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_reduce_scatter_single = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor

Sizes = Sequence[int] | None


class TensorTransport(Protocol):
    """How the ranks of one group exchange tensors; `collectives` says what each operation does."""

    def all_reduce(self, x: Tensor) -> Work[Tensor]:
        """Sum [...] in place."""
        ...

    def all_gather(self, x: Tensor, sizes: Sizes) -> Work[Tensor]:
        """[t/tp, ...] -> [t, ...]."""
        ...

    def reduce_scatter(self, x: Tensor, sizes: Sizes) -> Work[Tensor]:
        """[t, ...] -> [t/tp, ...]."""
        ...

    def all_to_all(self, x: Tensor, output_sizes: Sizes, input_sizes: Sizes) -> Work[Tensor]:
        """[t, ...] -> [t', ...]."""
        ...

    def ring_shift(self, x: Tensor) -> Work[Tensor]:
        """[...] of this rank -> [...] of the rank before."""
        ...


class NativeTransport:
    """The collectives of the backend (NCCL)."""

    def __init__(self, group: Group) -> None:
        self.group, self.size = group, group.size()

    def all_reduce(self, x: Tensor) -> Work[Tensor]:
        """Sum [...]; see `TensorTransport`."""
        return Work.of([dist.all_reduce(x, group=self.group, async_op=True)], x)

    def all_gather(self, x: Tensor, sizes: Sizes) -> Work[Tensor]:
        """[t/tp, ...] -> [t, ...]; see `TensorTransport`."""
        if sizes is not None:
            gathered = x.new_empty((sum(sizes), *x.shape[1:]))
            pieces = list(gathered.split(list(sizes)))
            return Work.of([dist.all_gather(pieces, x, self.group, async_op=True)], gathered)
        gathered = x.new_empty((x.shape[0] * self.size, *x.shape[1:]))
        work = _all_gather_single(gathered, x, group=self.group, async_op=True)
        return Work.of([work], gathered)

    def reduce_scatter(self, x: Tensor, sizes: Sizes) -> Work[Tensor]:
        """[t, ...] -> [t/tp, ...]; see `TensorTransport`."""
        if sizes is not None:
            return self._sum_of_pieces(x, sizes[self.group.rank()], list(sizes))
        result = x.new_empty((x.shape[0] // self.size, *x.shape[1:]))
        work = _reduce_scatter_single(result, x, group=self.group, async_op=True)
        return Work.of([work], result)

    def _sum_of_pieces(self, x: Tensor, own: int, sizes: list[int] | None) -> Work[Tensor]:
        """Exchange the pieces, of which this rank keeps `own` rows, and add them in rank order."""
        pieces = x.new_empty((self.size * own, *x.shape[1:]))
        received = None if sizes is None else [own] * self.size

        def steps() -> Steps[Tensor]:
            yield [dist.all_to_all_single(pieces, x, received, sizes, self.group, async_op=True)]
            by_rank = pieces.view(self.size, own, *x.shape[1:])
            # Two need no reduction kernel.
            return by_rank[0] + by_rank[1] if self.size == 2 else by_rank.sum(0)

        return Work(steps())

    def all_to_all(self, x: Tensor, output_sizes: Sizes, input_sizes: Sizes) -> Work[Tensor]:
        """[t, ...] -> [t', ...]; see `TensorTransport`."""
        rows = x.shape[0] if output_sizes is None else sum(output_sizes)
        received = x.new_empty((rows, *x.shape[1:]))
        sizes = [None if s is None else list(s) for s in (output_sizes, input_sizes)]
        work = dist.all_to_all_single(received, x, *sizes, group=self.group, async_op=True)
        return Work.of([work], received)

    def ring_shift(self, x: Tensor) -> Work[Tensor]:
        """[...] -> [...]; see `TensorTransport`."""
        rank, received = self.group.rank(), torch.empty_like(x)
        following = dist.get_global_rank(self.group, (rank + 1) % self.size)
        preceding = dist.get_global_rank(self.group, (rank - 1) % self.size)
        # One batch: separate calls deadlock on NCCL when every rank sends first.
        works = dist.batch_isend_irecv(
            [
                dist.P2POp(dist.isend, x, following, self.group),
                dist.P2POp(dist.irecv, received, preceding, self.group),
            ]
        )
        return Work(_until_received(works, x, received))


def _until_received(works: Sequence[Handle], _sent: Tensor, received: Tensor) -> Steps[Tensor]:
    """Keep `_sent` alive until it has left."""
    yield works
    return received


class GlooTransport(NativeTransport):
    """The same on a CPU, where gloo lacks some operations and others have a better algorithm."""

    def all_gather(self, x: Tensor, sizes: Sizes) -> Work[Tensor]:
        """[t/tp, ...] -> [t, ...]; see `TensorTransport`."""
        if sizes is None:
            return super().all_gather(x, None)
        # gloo gathers equal pieces only; its all-to-all takes any sizes.
        copies = x.repeat(self.size, *[1] * (x.dim() - 1))
        return self.all_to_all(copies, sizes, [x.shape[0]] * self.size)

    def reduce_scatter(self, x: Tensor, sizes: Sizes) -> Work[Tensor]:
        """[t, ...] -> [t/tp, ...]; see `TensorTransport`."""
        if sizes is not None:
            return super().reduce_scatter(x, sizes)
        # gloo makes a reduce-scatter of an all-reduce, which moves twice the bytes. Exchanging
        # the pieces and adding them here moves the least.
        return self._sum_of_pieces(x, x.shape[0] // self.size, None)
