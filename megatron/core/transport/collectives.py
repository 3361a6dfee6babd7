"""Collectives between the ranks of a group, without autograd: the best algorithm of each backend.

Everything here works on dimension 0 ("rows") of contiguous tensors; `tensor_parallel.mappings` puts
autograd and other dimensions on top. Sums are computed in a fixed order, so all ranks of a group
hold the same bits: replicated weights stay equal without ever being compared.

Each operation comes twice: `start_all_gather` returns `Work`, whose `wait()` returns what
`all_gather` returns. Do not touch the tensors of an operation in between.

Shapes: `t` rows of the full tensor, a slash divides by the size of the group.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from megatron.core.foundation.heartbeat.place import noted
from megatron.core.topology.group import Group
from megatron.core.transport import torch_collectives
from megatron.core.transport.transport import exchange_and_add, select_transport
from megatron.core.transport.work import Handle, Steps, Work

Sizes = Sequence[int] | None


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
        return _all_gather_uneven(x.contiguous(), group, sizes)
    return select_transport(x, group).all_gather(x.contiguous())


@noted("all_to_all", group_at=1)
def _all_gather_uneven(x: Tensor, group: Group, sizes: Sequence[int]) -> Work[Tensor]:
    """Gather `sizes[i]` rows of each rank i: [t_i, ...] -> [t, ...]."""
    if x.is_cpu:
        # gloo gathers equal pieces only; its all-to-all takes any sizes.
        copies = x.repeat(group.size(), *[1] * (x.dim() - 1))
        return start_all_to_all(copies, group, sizes, [x.shape[0]] * group.size())
    gathered = x.new_empty((sum(sizes), *x.shape[1:]))
    pieces = list(gathered.split(list(sizes)))
    return Work.of([dist.all_gather(pieces, x, group, async_op=True)], gathered)


def reduce_scatter(x: Tensor, group: Group, sizes: Sizes = None) -> Tensor:
    """Sum [t, ...] over `group`, each rank keeping its piece [t/tp, ...].

    Args:
        sizes: rows that each rank keeps, where they are not all equal.
    """
    return start_reduce_scatter(x, group, sizes).wait()


def start_reduce_scatter(x: Tensor, group: Group, sizes: Sizes = None) -> Work[Tensor]:
    """Start `reduce_scatter` of [t, ...] to [t/tp, ...]."""
    if sizes is not None:
        return _reduce_scatter_uneven(x.contiguous(), group, sizes)
    is_even = x.shape[0] % group.size() == 0
    assert is_even, f"{x.shape[0]} rows do not split over {group.size()} ranks"
    return select_transport(x, group).reduce_scatter(x.contiguous())


@noted("all_to_all", group_at=1)
def _reduce_scatter_uneven(x: Tensor, group: Group, sizes: Sequence[int]) -> Work[Tensor]:
    """Sum x [t, ...]; rank i keeps `sizes[i]` rows [t_i, ...]."""
    return exchange_and_add(x, group, sizes[group.rank()], sizes)


def all_to_all(
    x: Tensor, group: Group, output_sizes: Sizes = None, input_sizes: Sizes = None
) -> Tensor:
    """Send piece i of `x` [t, ...] to rank i and join the pieces received, in rank order.

    Args:
        output_sizes, input_sizes: rows received from and sent to each rank; equal if None.
    """
    return start_all_to_all(x, group, output_sizes, input_sizes).wait()


@noted("all_to_all", group_at=1)
def start_all_to_all(
    x: Tensor, group: Group, output_sizes: Sizes = None, input_sizes: Sizes = None
) -> Work[Tensor]:
    """Start `all_to_all` of [t, ...]."""
    num_received = x.shape[0] if output_sizes is None else sum(output_sizes)
    received = x.new_empty((num_received, *x.shape[1:]))
    into, out_of = (None if s is None else list(s) for s in (output_sizes, input_sizes))
    work = dist.all_to_all_single(received, x.contiguous(), into, out_of, group, async_op=True)
    return Work.of([work], received)


@noted("ring_shift", group_at=1)
def start_ring_shift(x: Tensor, group: Group) -> Work[Tensor]:
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


def broadcast(x: Tensor, group: Group) -> Tensor:
    """Copy `x` [...] of the group's first rank into `x` of the others, in place, and return it."""
    return torch_collectives.broadcast(x, group)
