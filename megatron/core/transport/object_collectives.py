"""Collectives on Python values, and errors that all ranks of a group raise together.

A lone raise is a hang: if a check can fail on one rank only, call `raise_on_all_ranks` before the
next collective.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import torch
import torch.distributed as dist

from megatron.core.foundation.errors import MegatronError
from megatron.core.foundation.flight_recorder import recorded
from megatron.core.topology.group import Group, SingleRank
from megatron.core.transport import torch_collectives

# Functions ----------------------------------------------------------------------------------


@recorded("all_gather_object", group_at=1)
def all_gather_object(value: object, group: Group) -> list[Any]:
    """Return the picklable value of every rank of `group`, in rank order.

    Communication:
        one all-gather of pickles; none in a group of one.
    """
    if not torch_collectives.has_peers(group):
        return [value]
    gathered: list[Any] = [None] * dist.get_world_size(group)
    dist.all_gather_object(gathered, value, group=group)
    return gathered


@recorded("broadcast_object", group_at=2)
def broadcast_object(value: object, source: int, group: Group) -> Any:
    """Return the picklable value of rank `source` of `group`.

    Communication:
        one broadcast of its pickle; none in a group of one.
    """
    if not torch_collectives.has_peers(group):
        return value
    slot, where = [value], torch_collectives.tensor_device(group)
    dist.broadcast_object_list(
        slot, torch_collectives.global_rank(group, source), group, device=where
    )
    return slot[0]


def any_across_ranks(claim: bool, group: Group) -> bool:
    """Return whether `claim` is True on any rank of `group`.

    Communication:
        one all-reduce of one number; none in a group of one.
    """
    return bool(largest_across_ranks([claim], group)[0])


def max_across_ranks(value: int, group: Group) -> int:
    """Return the largest `value`, of at most 2**53, in `group`.

    Communication:
        one all-reduce of one number; none in a group of one.
    """
    return int(largest_across_ranks([value], group)[0])


def largest_across_ranks(values: Sequence[float], group: Group) -> list[float]:
    """Return the largest of each number in `group`, in fp64; equal on all its ranks.

    Communication:
        one all-reduce; none in a group of one.
    """
    return sum_across_ranks(values, group, dist.ReduceOp.MAX)


def sum_across_ranks(
    values: Sequence[float], group: Group, op: dist.ReduceOp.RedOpType = dist.ReduceOp.SUM
) -> list[float]:
    """Return the sums over `group` of each number, in fp64; equal on all its ranks.

    Args:
        op: another reduction than a sum.
    Communication:
        one all-reduce; none in a group of one.
    """
    if not torch_collectives.has_peers(group):
        return list(values)
    where = torch_collectives.tensor_device(group)
    numbers = torch.tensor(values, dtype=torch.float64, device=where)
    return torch_collectives.all_reduce(numbers, group, op).tolist()


def union_across_ranks(names: Sequence[str], group: Group) -> list[str]:
    """Return the names that any rank of `group` has, in the same order on all ranks.

    Communication:
        one all-gather of small Python objects; none in a group of one.
    """
    return list(
        dict.fromkeys(name for mine in all_gather_object(list(names), group) for name in mine)
    )


# An object per group, which tests can replace -----------------------------------------------


class ControlGroup(Protocol):
    """Ranks that exchange Python values. Every method is a collective.

    A Protocol, so that tests can replace the ranks by threads of one process.
    """

    rank: int
    """This rank's position; 0 is the coordinator."""
    size: int
    """Number of ranks."""
    global_rank: int
    """This rank among all processes of the run, for messages."""

    def gather(self, value: object) -> list[Any] | None:
        """Collect one value per rank on the coordinator; None elsewhere."""
        ...

    def scatter(self, values: Sequence[object] | None) -> Any:
        """Send each rank its entry of the coordinator's list."""
        ...

    def broadcast(self, value: object) -> Any:
        """Send every rank the coordinator's value."""
        ...


class SingleProcess(ControlGroup):
    """One rank, no communication."""

    size = 1
    rank = global_rank = 0

    def gather(self, value: object) -> list[Any] | None:
        return [value]

    def scatter(self, values: Sequence[object] | None) -> Any:
        assert values is not None
        return values[0]

    def broadcast(self, value: object) -> Any:
        return value


class TorchControlGroup(ControlGroup):
    """The ranks of a process group."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        self.group = group
        self.rank = dist.get_rank(group)
        self.size = dist.get_world_size(group)
        self.global_rank = dist.get_rank()
        self._coordinator = dist.get_global_rank(group, 0)

    @recorded("gather_object")
    def gather(self, value: object) -> list[Any] | None:
        into: list[Any] | None = [None] * self.size if self.rank == 0 else None
        dist.gather_object(value, into, dst=self._coordinator, group=self.group)
        return into

    @recorded("scatter_object")
    def scatter(self, values: Sequence[object] | None) -> Any:
        mine: list[Any] = [None]
        dist.scatter_object_list(
            mine, None if values is None else list(values), src=self._coordinator, group=self.group
        )
        return mine[0]

    def broadcast(self, value: object) -> Any:
        return broadcast_object(value, 0, self.group)


def control_group(group: Group | ControlGroup) -> ControlGroup:
    """Return the ranks of a process group as a `ControlGroup`."""
    if isinstance(group, SingleRank):
        return SingleProcess()
    if isinstance(group, dist.ProcessGroup):
        return TorchControlGroup(group) if group.size() > 1 else SingleProcess()
    return group


def raise_on_all_ranks(problem: MegatronError | None, group: Group | ControlGroup) -> None:
    """Raise on every rank of `group` if any rank has a problem; return otherwise.

    All ranks raise the same error: the problem of the lowest rank that has one, with that global
    rank in the message. A rank's own problem is the cause of its error.

    Args:
        problem: the problem of this rank, or None.
        group: a group of one rank just raises its problem.
    Communication:
        one gather and one broadcast of a small Python object on `group`.
    """
    peers = control_group(group)
    if peers.size == 1:
        if problem is not None:
            raise problem
        return
    found = peers.gather(None if problem is None else (peers.global_rank, problem))
    first = None if found is None else next((f for f in found if f is not None), None)
    first = peers.broadcast(first)
    if first is not None:
        rank, shown = first
        agreed = shown.named(f"rank {rank}")
        agreed.is_agreed = True
        raise agreed from problem
