"""Collectives of a group's own backend (NCCL, gloo): numbers, small tensors, messages.

For activations and weights use `collectives`, which chooses a transport. A group of one rank sends
nothing. The group of all processes is `world()`.
"""

from __future__ import annotations

from typing import TypeGuard

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ReduceOp

from megatron.core.foundation import device
from megatron.core.foundation.flight_recorder import recorded
from megatron.core.topology.group import SINGLE_RANK, Group, SingleRank
from megatron.core.transport.work import Handle, Work


def world() -> Group:
    """Return the group of all processes; without torch.distributed this process alone."""
    group = dist.group.WORLD if dist.is_available() else None
    return SINGLE_RANK if group is None else group


def has_peers(group: Group) -> TypeGuard[dist.ProcessGroup]:
    """Return whether `group` has more than one rank; it is a process group then."""
    return group.size() > 1


def tensor_device(group: Group) -> torch.device:
    """Return the device of a collective's tensors: NCCL accepts device memory only."""
    is_cpu = isinstance(group, SingleRank) or dist.get_backend(group) == dist.Backend.GLOO
    return torch.device("cpu") if is_cpu else device.current_device()


@recorded("all_reduce", group_at=1)
def all_reduce(x: Tensor, group: Group, op: ReduceOp.RedOpType = ReduceOp.SUM) -> Tensor:
    """Reduce `x` of any shape [...] over `group`, in place, and return it."""
    if has_peers(group):
        dist.all_reduce(x, op, group)
    return x


@recorded("broadcast", group_at=1)
def broadcast(x: Tensor, group: Group, source: int = 0) -> Tensor:
    """Copy `x` of any shape [...] from rank `source` of `group` to the others, in place."""
    if has_peers(group):
        dist.broadcast(x, global_rank(group, source), group)
    return x


@recorded("broadcast", group_at=1)
def start_broadcast(x: Tensor, group: Group) -> Work[Tensor]:
    """Start to copy `x` of any shape [...] from the first rank of `group` to the others."""
    if not has_peers(group):
        return Work.completed(x)
    return Work.of([dist.broadcast(x, global_rank(group, 0), group, async_op=True)], x)


@recorded("all_gather", group_at=1)
def all_gather(x: Tensor, group: Group) -> list[Tensor]:
    """Return `x` [...] of every rank of `group`, in rank order; all have the same shape."""
    if not has_peers(group):
        return [x]
    gathered = [torch.empty_like(x) for _ in range(dist.get_world_size(group))]
    dist.all_gather(gathered, x, group)
    return gathered


@recorded("barrier", group_at=0)
def barrier(group: Group) -> None:
    """Wait until all ranks of `group` have called this."""
    if has_peers(group):
        dist.barrier(group)


def isend(x: Tensor, target: int, group: Group, tag: int = 0) -> Handle:
    """Start to send contiguous `x` [...] to rank `target` of `group`."""
    assert has_peers(group), "a group of one rank has no peer"
    work = dist.isend(x, global_rank(group, target), group, tag)
    assert work is not None, "both ranks belong to the group"
    return work


def irecv(x: Tensor, source: int, group: Group, tag: int = 0) -> Handle:
    """Start to receive into contiguous `x` [...] from rank `source` of `group`."""
    assert has_peers(group), "a group of one rank has no peer"
    work = dist.irecv(x, global_rank(group, source), group, tag)
    assert work is not None, "both ranks belong to the group"
    return work


def global_rank(group: Group, group_rank: int) -> int:
    """Return the number among all processes of a rank of `group`."""
    assert isinstance(group, dist.ProcessGroup), f"{group} has no ranks but this one"
    return dist.get_global_rank(group, group_rank)
