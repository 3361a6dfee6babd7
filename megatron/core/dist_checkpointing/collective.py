"""Steps of a save or a load that all ranks take together: one failure is raised on all ranks."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

from megatron.core.dist_checkpointing.durable import describe_os_error
from megatron.core.dist_checkpointing.object_store import StoragePath
from megatron.core.foundation.errors import CheckpointError, MegatronError
from megatron.core.transport.object_collectives import ControlGroup, raise_on_all_ranks

Result = TypeVar("Result")


def run_collectively(
    peers: ControlGroup, doing: str, function: Callable[[], Result], path: object = None
) -> Result:
    """Call `function` on this rank and return its result, or raise on every rank if any fails.

    Args:
        doing, path: see `as_checkpoint_error`.
    """
    problem: MegatronError | None = None
    result: Any = None
    try:
        result = function()
    except Exception as error:
        problem = as_checkpoint_error(error, doing, path)
        if problem.is_agreed:
            raise
    raise_on_all_ranks(problem, peers)
    return result


class AgreeingGroup:
    """A control group: an exception on one rank is raised on all ranks at their next collective.

    `run` calls a function that may contain collectives on this group. Ranks agree on errors before
    each of these collectives and at the end of the function, so an error of one rank ends all of
    them at the next of these points. Collectives on other groups are not covered.
    """

    def __init__(self, peers: ControlGroup) -> None:
        self._peers = peers
        self.rank, self.size, self.global_rank = peers.rank, peers.size, peers.global_rank

    def run(self, doing: str, function: Callable[[], Result]) -> Result:
        """Call `function` on this rank and return its result, or raise on every rank if any fails.

        Args:
            doing: the attempt, for the message of an error that is not meant for users.
        """
        return run_collectively(self._peers, doing, function)

    def gather(self, value: object) -> list[Any] | None:
        """Agree on errors, then gather."""
        raise_on_all_ranks(None, self._peers)
        return self._peers.gather(value)

    def scatter(self, values: Sequence[object] | None) -> Any:
        """Agree on errors, then scatter."""
        raise_on_all_ranks(None, self._peers)
        return self._peers.scatter(values)

    def broadcast(self, value: object) -> Any:
        """Agree on errors, then broadcast."""
        raise_on_all_ranks(None, self._peers)
        return self._peers.broadcast(value)


def run_on_coordinator(
    peers: ControlGroup,
    function: Callable[[], Result],
    *,
    doing: str,
    path: str | os.PathLike[str] | StoragePath,
    needed_bytes: int | None = None,
) -> Result:
    """Call `function` on the coordinator and return its result on every rank: collective.

    Args:
        doing, path, needed_bytes: for the message of an error of the file system.
    Raises:
        MegatronError: the coordinator's error, on every rank.
    """
    problem: MegatronError | None = None
    result: Any = None
    if peers.rank == 0:
        try:
            result = function()
        except Exception as error:
            problem = as_checkpoint_error(error, doing, path, needed_bytes)
    raise_on_all_ranks(problem, peers)
    return peers.broadcast(result)


def print_once(peers: ControlGroup, text: str) -> None:
    """Print a line on the coordinator."""
    if peers.rank == 0:
        print(text, flush=True)


def as_checkpoint_error(
    error: Exception, doing: str, path: object = None, needed_bytes: int | None = None
) -> MegatronError:
    """Return `error` as a `MegatronError`, so that ranks can agree; the original is its cause.

    Args:
        doing, path, needed_bytes: the attempt; with a path, an error of the file system has advice.
    """
    if isinstance(error, MegatronError):
        return error
    if isinstance(error, OSError) and path is not None:
        return describe_os_error(error, path=str(path), doing=doing, needed_bytes=needed_bytes)
    what = doing if path is None else f"{doing} {path}"
    made = CheckpointError(f"{what} failed: {type(error).__name__}: {error}")
    made.__cause__ = error
    return made
