"""Collectives between the ranks of a group, without autograd: the best algorithm of each backend.

Everything here works on dimension 0 ("rows") of contiguous tensors; `tensor_parallel.mappings` puts
autograd and other dimensions on top. Sums are computed in a fixed order, so all ranks of a group
hold the same bits: replicated weights stay equal without ever being compared.

Each operation comes twice: `start_all_gather` returns `Work`, whose `wait()` returns what
`all_gather` returns. Do not touch the tensors of an operation in between.

Shapes: `t` rows of the full tensor, a slash divides by the size of the group.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from torch import Tensor

from megatron.core.transport import backend
from megatron.core.transport.shm.shm_collectives import open_shm_group
from megatron.core.transport.shm.shm_transport import ShmTransport
from megatron.core.transport.tensor_transport import (
    GlooTransport,
    NativeTransport,
    Sizes,
    TensorTransport,
)
from megatron.core.transport.work import Work

if TYPE_CHECKING:
    from megatron.core.process_groups_config import Group


def select_transport(x: Tensor, group: Group) -> TensorTransport:
    """Return how the ranks of `group` exchange tensors like `x` [...]."""
    if not x.is_cpu:
        return NativeTransport(group)
    shm = open_shm_group(group) if group.size() > 1 else None
    return GlooTransport(group) if shm is None else ShmTransport(group, shm)


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
    return select_transport(x, group).all_gather(x.contiguous(), sizes)


def reduce_scatter(x: Tensor, group: Group, sizes: Sizes = None) -> Tensor:
    """Sum [t, ...] over `group`, each rank keeping its piece [t/tp, ...].

    Args:
        sizes: rows that each rank keeps, where they are not all equal.
    """
    return start_reduce_scatter(x, group, sizes).wait()


def start_reduce_scatter(x: Tensor, group: Group, sizes: Sizes = None) -> Work[Tensor]:
    """Start `reduce_scatter` of [t, ...] to [t/tp, ...]."""
    even = sizes is not None or x.shape[0] % group.size() == 0
    assert even, f"{x.shape[0]} rows do not split over {group.size()} ranks"
    return select_transport(x, group).reduce_scatter(x.contiguous(), sizes)


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
    transport = NativeTransport(group)  # the same on every device
    return transport.all_to_all(x.contiguous(), output_sizes, input_sizes)


def start_ring_shift(x: Tensor, group: Group) -> Work[Tensor]:
    """Start to send `x` [...] to the next rank of `group`, and to receive as much from the one
    before; `x` may be overwritten when the work has ended."""
    return NativeTransport(group).ring_shift(x)


def broadcast(x: Tensor, group: Group) -> Tensor:
    """Copy `x` [...] of the group's first rank into `x` of the others, in place, and return it."""
    return backend.broadcast(x, group)
