"""Delete checkpoints that a rule does not keep, after verifying the newest one.

The newest checkpoint is always kept, and read back whole first: if it is damaged, nothing is
deleted. Without --yes it only prints what it would delete.
"""

from __future__ import annotations

import argparse
from contextlib import nullcontext

from megatron.core.dist_checkpointing import commit
from megatron.core.dist_checkpointing.durable import describe_os_error
from megatron.core.dist_checkpointing.object_store import storage_path
from megatron.core.dist_checkpointing.verify import verify_checkpoint
from megatron.core.foundation.errors import CheckpointError
from tools.checkpoint.opening import held


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options."""
    parser.add_argument("path", help="a save directory, or its URL")
    parser.add_argument("--keep-last", type=int, default=1, help="the newest N; default 1")
    parser.add_argument("--keep-every", type=int, help="iterations that N divides as well")
    parser.add_argument("--yes", action="store_true", help="delete, instead of only printing")


def run(arguments: argparse.Namespace) -> int:
    """Delete and return 0."""
    directory, last, every = storage_path(arguments.path), arguments.keep_last, arguments.keep_every
    if last < 1 or (every is not None and every < 1):
        raise CheckpointError(
            f"--keep-last {last}, --keep-every {every}.",
            rule="both are at least 1: the newest checkpoint is never deleted",
            flags=["--keep-last", "--keep-every"],
        )
    with held(directory) if arguments.yes else nullcontext():
        found = [
            f
            for f in commit.list_checkpoints(directory).checkpoints
            if isinstance(f.iteration, int) and not f.is_replaced
        ]
        if not found:
            raise CheckpointError(f"{directory} holds no iterations.", fix="give a save directory")
        kept = [f for i, f in enumerate(found) if i < last or (every and f.iteration % every == 0)]
        doomed = [f for f in found if f not in kept]
        if doomed:
            problems = verify_checkpoint(found[0].path).problems
            if problems:
                raise problems[0]
        for each in kept:
            print(f"keep    {each.path}")
        for each in doomed:
            print(f"{'deleted' if arguments.yes else 'delete '} {each.path}")
            if arguments.yes:
                try:
                    commit.remove_checkpoint(each, "0")
                except OSError as error:
                    path = str(each.path)
                    raise describe_os_error(error, path=path, doing="deleting") from error
    if doomed and not arguments.yes:
        print("nothing was deleted: add --yes")
    return 0
