"""Delete old checkpoints by a rule, after verifying the newest one.

The newest checkpoint is always kept. It is read completely first: if it is damaged, nothing is
deleted. Without --yes the command only prints the checkpoints that it would delete.
"""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import dataclass

from megatron.core.dist_checkpointing import commit
from megatron.core.dist_checkpointing.durable import describe_os_error
from megatron.core.dist_checkpointing.object_store import storage_path
from megatron.core.dist_checkpointing.verify import verify_checkpoint
from megatron.core.foundation.errors import CheckpointError
from megatron.core.settings.flags import positional
from tools.checkpoint.opening import held


@dataclass(frozen=True, kw_only=True)
class Flags:
    """Checkpoints to keep."""

    path: str = positional()
    """A save directory, or its URL."""
    keep_last: int = 1
    """Keep the newest N, and the checkpoint named by the tracker; default 1."""
    keep_every: int | None = None
    """Keep iterations that N divides as well."""
    yes: bool = False
    """Delete, instead of only printing."""


def run(flags: Flags) -> int:
    """Delete the checkpoints and return 0."""
    directory, last, every = storage_path(flags.path), flags.keep_last, flags.keep_every
    if last < 1 or (every is not None and every < 1):
        raise CheckpointError(
            f"--keep-last {last}, --keep-every {every}.",
            rule="both are at least 1: the newest checkpoint is never deleted",
            flags=["--keep-last", "--keep-every"],
        )
    with held(directory) if flags.yes else nullcontext():
        found = [
            f
            for f in commit.list_checkpoints(directory).checkpoints
            if isinstance(f.iteration, int) and not f.is_replaced
        ]
        if not found:
            raise CheckpointError(f"{directory} holds no iterations.", fix="give a save directory")
        named = commit.read_tracker(directory)  # a user may have set it to an earlier iteration
        kept = [
            f
            for i, f in enumerate(found)
            if i < last or f.iteration == named or (every and f.iteration % every == 0)
        ]
        doomed = [f for f in found if f not in kept]
        if doomed:
            problems = verify_checkpoint(found[0].path).problems
            if problems:
                raise problems[0]
        for each in kept:
            print(f"keep    {each.path}")
        for each in doomed:
            print(f"{'deleted' if flags.yes else 'delete '} {each.path}")
            if flags.yes:
                try:
                    commit.remove_checkpoint(each, "0")
                except OSError as error:
                    path = str(each.path)
                    raise describe_os_error(error, path=path, doing="deleting") from error
    if doomed and not flags.yes:
        print("nothing was deleted: add --yes")
    return 0
