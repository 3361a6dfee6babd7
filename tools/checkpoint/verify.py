"""Read every byte of a checkpoint and print damaged files; exit with 1 if there are any."""

from __future__ import annotations

from dataclasses import dataclass

from megatron.core.dist_checkpointing import commit
from megatron.core.dist_checkpointing.object_store import storage_path
from megatron.core.dist_checkpointing.verify import verify_checkpoint
from tools.checkpoint.opening import PathFlags, checkpoint_in, size_text


@dataclass(frozen=True, kw_only=True)
class Flags(PathFlags):
    """Checkpoints to verify."""

    all: bool = False
    """Verify every checkpoint of SAVE."""


def run(flags: Flags) -> int:
    """Print one line per checkpoint, and return whether any is damaged."""
    path = storage_path(flags.path)
    paths = [checkpoint_in(path)]
    if flags.all:
        paths = [found.path for found in commit.list_checkpoints(path).checkpoints]
    is_damaged = False
    for each in paths:
        result = verify_checkpoint(each)
        for name in result.unlisted:
            print(f"{each / name}: not part of the checkpoint, never opened")
        for problem in result.problems:
            print(problem)
        is_damaged |= bool(result.problems)
        verdict = "DAMAGED" if result.problems else "intact"
        print(f"{each}: {verdict} ({result.num_files} files, {size_text(result.num_bytes)} read)")
    return int(is_damaged)
