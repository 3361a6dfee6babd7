"""Collectives between the ranks of a group, without autograd: the best algorithm of each backend.

All functions work on dimension 0 ("rows") of contiguous tensors; `tensor_parallel.mappings` adds
autograd and other dimensions. Sums are computed in a fixed order, so all ranks of a group hold the
same bits: replicated weights stay equal without a comparison.

Each operation has two forms: `start_all_gather` returns `Work`, and its `wait()` returns the result
of `all_gather`. Do not touch the tensors of an operation in between.

Shapes: `t` rows of the full tensor, a slash divides by the size of the group.
"""

from __future__ import annotations

from torch import Tensor

from megatron.core.topology.group import Group
from megatron.core.transport import torch_collectives, transport
from megatron.core.transport.transport import Sizes, select_transport
from megatron.core.transport.work import Work


def all_reduce(x: Tensor, group: Group) -> Tensor:
    """Sum contiguous `x` [...] over `group` in place and return it."""
    return start_all_reduce(x, group).wait()


def start_all_reduce(x: Tensor, group: Group) -> Work[Tensor]:
    """Start `all_reduce` of `x` [...]."""
    return select_transport(x, group).all_reduce(x)


def all_gather(x: Tensor, group: Group, sizes: Sizes = None) -> Tensor:
    """Collect pieces [t/tp, ...] of all ranks to [t, ...], in rank order.

    Args:
        sizes: rows of each rank's piece, where they are not all equal.
    """
    return start_all_gather(x, group, sizes).wait()


def start_all_gather(x: Tensor, group: Group, sizes: Sizes = None) -> Work[Tensor]:
    """Start `all_gather` of [t/tp, ...] to [t, ...]."""
    if sizes is not None:
        return transport.all_gather_uneven(x.contiguous(), group, sizes)
    return select_transport(x, group).all_gather(x.contiguous())


def reduce_scatter(x: Tensor, group: Group, sizes: Sizes = None) -> Tensor:
    """Sum [t, ...] over `group`, each rank keeping its piece [t/tp, ...].

    Args:
        sizes: rows that each rank keeps, where they are not all equal.
    """
    return start_reduce_scatter(x, group, sizes).wait()


def start_reduce_scatter(x: Tensor, group: Group, sizes: Sizes = None) -> Work[Tensor]:
    """Start `reduce_scatter` of [t, ...] to [t/tp, ...]."""
    if sizes is not None:
        return transport.reduce_scatter_uneven(x.contiguous(), group, sizes)
    is_even = x.shape[0] % group.size() == 0
    assert is_even, f"{x.shape[0]} rows do not split over {group.size()} ranks"
    return select_transport(x, group).reduce_scatter(x.contiguous())


def all_to_all(
    x: Tensor, group: Group, output_sizes: Sizes = None, input_sizes: Sizes = None
) -> Tensor:
    """Send piece i of `x` [t, ...] to rank i and join the pieces received, in rank order.

    Args:
        output_sizes, input_sizes: rows received from and sent to each rank; equal if None.
    """
    return start_all_to_all(x, group, output_sizes, input_sizes).wait()


def start_all_to_all(
    x: Tensor, group: Group, output_sizes: Sizes = None, input_sizes: Sizes = None
) -> Work[Tensor]:
    """Start `all_to_all` of [t, ...]."""
    return transport.exchange(x.contiguous(), group, output_sizes, input_sizes)


def start_ring_shift(x: Tensor, group: Group) -> Work[Tensor]:
    """Start to send `x` [...] to the next rank of `group`; see `transport.ring_shift`."""
    return transport.ring_shift(x, group)


def broadcast(x: Tensor, group: Group) -> Tensor:
    """Copy `x` [...] of the group's first rank into `x` of the others, in place, and return it."""
    return torch_collectives.broadcast(x, group)
