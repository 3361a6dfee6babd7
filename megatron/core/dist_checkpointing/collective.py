"""Decisions on checkpoints that all ranks take together, whatever exception one of them meets."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

from megatron.core.errors import CheckpointError, MegatronError
from megatron.core.transport.object_collectives import ControlGroup, raise_on_all_ranks

Result = TypeVar("Result")


def run_collectively(peers: ControlGroup, doing: str, function: Callable[[], Result]) -> Result:
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
    raise_on_all_ranks(problem, peers)
    return result


def as_checkpoint_error(error: Exception, doing: str) -> MegatronError:
    """Return `error` in the family that ranks can agree on; the original stays its cause."""
    if isinstance(error, MegatronError):
        return error
    made = CheckpointError(f"{doing} failed: {type(error).__name__}: {error}")
    made.__cause__ = error
    return made
