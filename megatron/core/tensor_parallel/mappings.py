"""Conjugate pairs: a collective in forward, its transpose in backward.

Tensor parallelism (Megatron-LM, section 3, arXiv 1909.08053) needs the pair copy/reduce around
each block; sequence parallelism (Reducing Activation Recomputation, section 4.2.2, arXiv
2205.05198) replaces it with gather/reduce-scatter along the sequence.

Everywhere: `group=None` is the tensor-parallel group of the current collection, and a group of
size 1 returns the input itself.

Shapes: `s` sequence, `b` micro batch, `h` hidden; a slash divides by the size of the group.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from megatron.core.process_groups_config import resolve_group
from megatron.core.step_context.overlap import yield_to_peer
from megatron.core.topology.group import Group
from megatron.core.transport import collectives
from megatron.core.transport.work import Work
from megatron.core.utils import divide

Sizes = Sequence[int] | None


# Without autograd ---------------------------------------------------------------------------


def _own_piece(x: Tensor, dim: int, group: Group) -> Tensor:
    """Cut this rank's equal piece out of `dim`, contiguous."""
    length = divide(x.shape[dim], group.size())
    return x.narrow(dim, group.rank() * length, length).contiguous()


def _gather_last_dim(x: Tensor, group: Group) -> Tensor:
    """Collect [..., h/tp] to [..., h]."""
    size = group.size()
    gathered = collectives.all_gather(x.contiguous().view(1, *x.shape), group)  # [tp, ..., h/tp]
    return gathered.movedim(0, -2).reshape(*x.shape[:-1], size * x.shape[-1])


def _reduce_scatter_last_dim(x: Tensor, group: Group) -> Tensor:
    """Sum [..., h] over the group, each rank keeping its [..., h/tp]."""
    size, x = group.size(), x.contiguous()
    pieces = x.view(*x.shape[:-1], size, divide(x.shape[-1], size)).movedim(-2, 0)
    return collectives.reduce_scatter(pieces, group).squeeze(0)


# Autograd pairs -----------------------------------------------------------------------------


Collective = Callable[[Tensor, Group], Tensor]


class CollectivePair(torch.autograd.Function):
    """A collective and its transpose: `apply(x, group, collective, transpose)`.

    Forward returns `collective(x, group)`, backward `transpose(grad, group)`.
    """

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, group: Group, collective: Collective, transpose: Collective
    ) -> Tensor:
        ctx.group, ctx.transpose = group, transpose
        return collective(x, group)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None]:
        return ctx.transpose(grad, ctx.group), None, None, None


def _paired(
    x: Tensor, group: Group | None, collective: Collective, transpose: Collective
) -> Tensor:
    group = resolve_group(group, "tp")
    return x if group.size() == 1 else CollectivePair.apply(x, group, collective, transpose)


def _identity(x: Tensor, _group: Group) -> Tensor:
    return x.view_as(x)


def _all_reduce(x: Tensor, group: Group) -> Tensor:
    # Copy: the caller, or another branch of the graph, may still use the tensor.
    return collectives.all_reduce(x.clone(memory_format=torch.contiguous_format), group)


def _gather_sequence(x: Tensor, group: Group, sizes: Sizes = None) -> Tensor:
    return collectives.all_gather(x, group, sizes)


def _reduce_scatter_sequence(x: Tensor, group: Group, sizes: Sizes = None) -> Tensor:
    return collectives.reduce_scatter(x, group, sizes)


def _own_sequence_piece(x: Tensor, group: Group, sizes: Sizes = None) -> Tensor:
    if sizes is None:
        return _own_piece(x, 0, group)
    return x.split(list(sizes))[group.rank()].contiguous()


def _own_last_dim_piece(x: Tensor, group: Group) -> Tensor:
    return _own_piece(x, x.dim() - 1, group)


def _exchanged(x: Tensor, group: Group, output_sizes: Sizes, input_sizes: Sizes) -> Tensor:
    work = collectives.start_all_to_all(x, group, output_sizes, input_sizes)
    yield_to_peer()
    return work.wait()


@dataclass
class _AsyncAllToAll:
    """One all-to-all that overlaps with other computation, forward and backward."""

    group: Group
    output_sizes: Sizes
    input_sizes: Sizes
    work: Work[Tensor] | None = None

    def start(self, x: Tensor, *, back: bool) -> Tensor:
        """Start the exchange, forward or `back`; return the tensor that will contain the result."""
        sizes = (self.output_sizes, self.input_sizes)
        received, sent = reversed(sizes) if back else sizes
        self.work = collectives.start_all_to_all(x, self.group, received, sent)
        assert self.work.destination is not None
        return self.work.destination

    def end(self) -> Tensor:
        assert self.work is not None
        yield_to_peer()
        work, self.work = self.work, None
        return work.wait()


class _A2AStart(torch.autograd.Function):
    """Forward starts the exchange, backward ends the returning one."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, exchange: _AsyncAllToAll) -> Tensor:
        ctx.exchange = exchange
        return exchange.start(x, back=False)

    @staticmethod
    def backward(ctx: Any, _grad: Tensor) -> tuple[Tensor, None]:
        return ctx.exchange.end(), None


class _A2AWait(torch.autograd.Function):
    """Forward ends the exchange, backward starts the returning one.

    The autograd engine runs ready nodes in the reverse order of their creation. So the backward of
    everything computed between the two runs before the engine waits for the returning exchange.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, exchange: _AsyncAllToAll) -> Tensor:
        ctx.exchange = exchange
        exchange.end()
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        ctx.exchange.start(grad, back=True)
        # Any tensor of the input's shape: the other end returns the received gradient.
        return grad, None


# Public names -------------------------------------------------------------------------------


def copy_to_tensor_model_parallel_region(input_: Tensor, group: Group | None = None) -> Tensor:
    """Enter a tensor-parallel block: forward the input itself, backward all-reduce.

    Args:
        input_: [...], equal on all ranks.
    """
    return _paired(input_, group, _identity, _all_reduce)


def reduce_from_tensor_model_parallel_region(input_: Tensor, group: Group | None = None) -> Tensor:
    """Leave a tensor-parallel block: all-reduce partial sums [...]; backward is the identity."""
    return _paired(input_, group, _all_reduce, _identity)


def scatter_to_tensor_model_parallel_region(input_: Tensor, group: Group | None = None) -> Tensor:
    """Keep this rank's part of the last dimension: [..., h] -> [..., h/tp]; backward gathers."""
    return _paired(input_, group, _own_last_dim_piece, _gather_last_dim)


def gather_from_tensor_model_parallel_region(input_: Tensor, group: Group | None = None) -> Tensor:
    """Collect the last dimension: [..., h/tp] -> [..., h]; backward keeps this rank's part.

    For results that all ranks then use in the same way; if ranks use them differently, use
    `all_gather_last_dim_from_tensor_parallel_region`.
    """
    return _paired(input_, group, _gather_last_dim, _own_last_dim_piece)


def scatter_to_sequence_parallel_region(input_: Tensor, group: Group | None = None) -> Tensor:
    """Keep this rank's rows: [s, ...] -> [s/tp, ...]; backward gathers them."""
    return _paired(input_, group, _own_sequence_piece, _gather_sequence)


def gather_from_sequence_parallel_region(
    input_: Tensor,
    tensor_parallel_output_grad: bool = True,
    group: Group | None = None,
    output_split_sizes: Sizes = None,
    use_global_buffer: bool = False,
) -> Tensor:
    """Collect the rows of all ranks: [s/tp, ...] -> [s, ...].

    Args:
        tensor_parallel_output_grad: True if a tensor-parallel computation follows, whose gradients
            are partial sums: backward reduce-scatters. False if all ranks compute the same
            afterwards: backward keeps this rank's rows.
        output_split_sizes: rows of each rank, if unequal.
        use_global_buffer: accepted for compatibility; torch's allocator recycles the memory.
    """
    gather = partial(_gather_sequence, sizes=output_split_sizes)
    if tensor_parallel_output_grad:
        scatter: Collective = partial(_reduce_scatter_sequence, sizes=output_split_sizes)
    else:
        scatter = partial(_own_sequence_piece, sizes=output_split_sizes)
    return _paired(input_, group, gather, scatter)


def reduce_scatter_to_sequence_parallel_region(
    input_: Tensor,
    group: Group | None = None,
    input_split_sizes: Sizes = None,
    use_global_buffer: bool = False,
) -> Tensor:
    """Sum partial results and keep this rank's rows: [s, ...] -> [s/tp, ...]; backward gathers."""
    scatter = partial(_reduce_scatter_sequence, sizes=input_split_sizes)
    return _paired(input_, group, scatter, partial(_gather_sequence, sizes=input_split_sizes))


def all_gather_last_dim_from_tensor_parallel_region(
    input_: Tensor, group: Group | None = None
) -> Tensor:
    """Collect the last dimension: [..., h/tp] -> [..., h]; backward reduce-scatters it."""
    return _paired(input_, group, _gather_last_dim, _reduce_scatter_last_dim)


def reduce_scatter_last_dim_to_tensor_parallel_region(
    input_: Tensor, group: Group | None = None
) -> Tensor:
    """Sum over ranks and keep this rank's part: [..., h] -> [..., h/tp]; backward gathers."""
    return _paired(input_, group, _reduce_scatter_last_dim, _gather_last_dim)


def all_to_all(
    group: Group,
    input_: Tensor,
    output_split_sizes_: Sizes = None,
    input_split_sizes: Sizes = None,
    overlap_fn: Callable[[], None] | None = None,
) -> Tensor:
    """Send rows to every rank and receive rows from every rank: [t, ...] -> [t', ...].

    Backward sends them back.

    Args:
        output_split_sizes_, input_split_sizes: rows received from and sent to each rank; None
            for equal pieces.
        overlap_fn: called while the rows are in flight. The backward pass of its results runs while
            the gradients of the rows are in flight.
    """
    if group.size() == 1:
        if overlap_fn is not None:
            overlap_fn()
        return input_
    if overlap_fn is not None:
        exchange = _AsyncAllToAll(group, output_split_sizes_, input_split_sizes)
        rows = _A2AStart.apply(input_, exchange)
        overlap_fn()
        return _A2AWait.apply(rows, exchange)
    sizes = output_split_sizes_, input_split_sizes
    there, back = (
        partial(_exchanged, output_sizes=received, input_sizes=sent)
        for received, sent in (sizes, sizes[::-1])
    )
    return CollectivePair.apply(input_, group, there, back)


def all_to_all_sp2hp(input_: Tensor, group: Group | None = None) -> Tensor:
    """Exchange split tokens for a split hidden dimension: [t/tp, ..., h] -> [t, h/tp]."""
    group = resolve_group(group, "tp")
    size = group.size()
    if size == 1:
        return input_
    tokens = input_.reshape(-1, input_.shape[-1])
    pieces = tokens.view(tokens.shape[0], size, -1).transpose(0, 1)  # [tp, t/tp, h/tp]
    return all_to_all(group, pieces.reshape(-1, pieces.shape[-1]))


def all_to_all_hp2sp(input_: Tensor, group: Group | None = None) -> Tensor:
    """Exchange a split hidden dimension for split tokens: [t, ..., h/tp] -> [t/tp, h]."""
    group = resolve_group(group, "tp")
    size = group.size()
    if size == 1:
        return input_
    tokens = input_.reshape(-1, input_.shape[-1])
    pieces = all_to_all(group, tokens).view(size, -1, tokens.shape[-1])  # [tp, t/tp, h/tp]
    return pieces.transpose(0, 1).reshape(pieces.shape[1], -1)


__all__ = [
    "all_gather_last_dim_from_tensor_parallel_region",
    "all_to_all",
    "all_to_all_hp2sp",
    "all_to_all_sp2hp",
    "copy_to_tensor_model_parallel_region",
    "gather_from_sequence_parallel_region",
    "gather_from_tensor_model_parallel_region",
    "reduce_from_tensor_model_parallel_region",
    "reduce_scatter_last_dim_to_tensor_parallel_region",
    "reduce_scatter_to_sequence_parallel_region",
    "scatter_to_sequence_parallel_region",
    "scatter_to_tensor_model_parallel_region",
]
