"""The few collectives of a save or load: small Python objects, and one decision for all ranks.

Mechanisms below take `Peers`, so that the protocol can be tested with threads in one process.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol, TypeVar

import torch.distributed as dist

from megatron.core.errors import CheckpointError, MegatronError

Result = TypeVar("Result")


class Peers(Protocol):
    """The ranks that save or load together. Every method is a collective."""

    @property
    def rank(self) -> int:
        """This rank's position; 0 is the coordinator."""
        ...

    @property
    def size(self) -> int:
        """Number of ranks."""
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

    rank = 0
    size = 1

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


def agree(problem: MegatronError | None, peers: Peers) -> None:
    """Raise on every rank if any rank brings a problem: a lone raise is a hang.

    All raise the problem of the lowest rank that has one, so that all decide alike what to do next.
    """
    problems = peers.gather(problem)
    first = None
    if problems is not None:
        first = next(((r, p) for r, p in enumerate(problems) if p is not None), None)
    first = peers.broadcast(first)
    if first is not None:
        rank, other = first
        if rank == peers.rank and problem is not None:
            raise problem
        raise type(other)(
            f"rank {rank}: {other.found}", rule=other.rule, flags=other.flags, fix=other.fix
        )


def together(peers: Peers, doing: str, function: Callable[[], Result]) -> Result:
    """Call `function` on this rank and return its result, or raise on every rank if any fails.

    Args:
        doing: what was tried, for the message of an error that is not meant for users.
    """
    problem: MegatronError | None = None
    result: Any = None
    try:
        result = function()
    except Exception as error:
        problem = as_checkpoint_error(error, doing)
    agree(problem, peers)
    return result


def as_checkpoint_error(error: Exception, doing: str) -> MegatronError:
    """Return `error` in the family that ranks can agree on; the original stays its cause."""
    if isinstance(error, MegatronError):
        return error
    made = CheckpointError(f"{doing} failed: {type(error).__name__}: {error}")
    made.__cause__ = error
    return made
