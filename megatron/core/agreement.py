"""Make all ranks of a group agree on success or failure: a lone raise is a hang."""

from __future__ import annotations

from typing import Any, Protocol

import torch.distributed as dist

from megatron.core.errors import MegatronError


class Peers(Protocol):
    """The ranks that decide together. Every method is a collective.

    Mechanisms take it where they want a protocol that threads of one process can test.
    """

    @property
    def rank(self) -> int:
        """This rank's position; 0 is the coordinator."""
        ...

    @property
    def size(self) -> int:
        """Number of ranks."""
        ...

    @property
    def global_rank(self) -> int:
        """This rank among all processes of the run, for messages."""
        ...

    def gather(self, value: Any) -> list[Any] | None:
        """Collect one value per rank on the coordinator; None elsewhere."""
        ...

    def scatter(self, values: list[Any] | None) -> Any:
        """Give each rank its entry of the coordinator's list."""
        ...

    def broadcast(self, value: Any) -> Any:
        """Give every rank the coordinator's value."""
        ...


class SingleProcess:
    """One rank, no communication."""

    size = 1
    rank = global_rank = 0

    def gather(self, value: Any) -> list[Any] | None:
        """See `Peers`."""
        return [value]

    def scatter(self, values: list[Any] | None) -> Any:
        """See `Peers`."""
        assert values is not None
        return values[0]

    def broadcast(self, value: Any) -> Any:
        """See `Peers`."""
        return value


class GroupPeers:
    """The ranks of a process group; None is all processes."""

    def __init__(self, group: dist.ProcessGroup | None = None) -> None:
        self.group = group
        self.rank = dist.get_rank(group)
        self.size = dist.get_world_size(group)
        self.global_rank = dist.get_rank()
        self._coordinator = 0 if group is None else dist.get_global_rank(group, 0)

    def gather(self, value: Any) -> list[Any] | None:
        """See `Peers`."""
        into: list[Any] | None = [None] * self.size if self.rank == 0 else None
        dist.gather_object(value, into, dst=self._coordinator, group=self.group)
        return into

    def scatter(self, values: list[Any] | None) -> Any:
        """See `Peers`."""
        mine: list[Any] = [None]
        dist.scatter_object_list(mine, values, src=self._coordinator, group=self.group)
        return mine[0]

    def broadcast(self, value: Any) -> Any:
        """See `Peers`."""
        box = [value]
        dist.broadcast_object_list(box, src=self._coordinator, group=self.group)
        return box[0]


def peers_of(group: dist.ProcessGroup | Peers | None) -> Peers:
    """Return the peers of a process group; None is all processes, or this one alone."""
    if group is not None and not isinstance(group, dist.ProcessGroup):
        return group
    if not (dist.is_available() and dist.is_initialized()) or dist.get_world_size(group) == 1:
        return SingleProcess()
    return GroupPeers(group)


def agree(problem: MegatronError | None, group: dist.ProcessGroup | Peers | None = None) -> None:
    """Raise on every rank of `group` if any rank brings a problem; return otherwise.

    All raise the same: the problem of the lowest rank that has one, with the global rank that
    found it in the message, so that all may decide the same. A rank whose own
    problem was another, or the same unnamed, has it as the cause.

    Args:
        problem: what this rank found, or None.
        group: who must agree; None means all processes. A rank alone just raises its problem.
    Communication:
        one gather and one broadcast of a small Python object on `group`.
    """
    peers = peers_of(group)
    if peers.size == 1:
        if problem is not None:
            raise problem
        return
    found = peers.gather(None if problem is None else (peers.global_rank, problem))
    first = None if found is None else next((f for f in found if f is not None), None)
    first = peers.broadcast(first)
    if first is not None:
        rank, shown = first
        raise shown.named(f"rank {rank}") from problem
