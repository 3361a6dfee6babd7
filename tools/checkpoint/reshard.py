"""Write a checkpoint with unsharded tensors in a given number of files.

Runs do not need this: every checkpoint loads in every layout. It simplifies moving a checkpoint:
thousands of shard files become a few, every safetensors reader can read the tensors, and optimizer
state can be left out. The digest does not change. The weights of a checkpoint of Megatron-LM or
DeepSpeed become a checkpoint of this program.
"""

from __future__ import annotations

from dataclasses import dataclass

from megatron.core.dist_checkpointing import commit
from megatron.core.dist_checkpointing.interop.contents import InteropContents
from megatron.core.dist_checkpointing.object_store import storage_path
from megatron.core.dist_checkpointing.rewrite import (
    Produced,
    plain_state,
    read_full,
    write_full_tensors,
)
from megatron.core.foundation.errors import CheckpointError
from megatron.core.settings.flags import positional
from tools.checkpoint.opening import OPTIMIZER_PREFIX, PathFlags, held, opened, size_text


@dataclass(frozen=True, kw_only=True)
class Flags(PathFlags):
    """Checkpoint, and the files to write."""

    out: str = positional()
    """The save directory to write to, or its URL."""
    files: int = 1
    """Number of shard files; default 1."""
    weights: bool = False
    """Leave optimizer state out."""


def run(flags: Flags) -> int:
    """Write the checkpoint and return 0."""
    contents = opened(storage_path(flags.path))
    found = contents.manifest.tensors
    out = storage_path(flags.out)
    final = out / contents.directory.name
    if isinstance(contents, InteropContents):
        if not flags.weights:
            raise CheckpointError(
                f"{contents.directory} is a checkpoint of {contents.kind}.",
                rule="only a run can convert the settings of another program's optimizer",
                flags=["--weights"],
                fix="give --weights, or --load it in a run and save it there",
            )
        final = out / commit.iteration_directory(contents.common_state().get("iteration", 0))
    with held(out), contents.open_reader() as reader:
        tensors = {
            key: Produced(t.dtype, t.shape, t.is_padded, lambda t=t: read_full(t, reader))
            for key, t in found.items()
            if not (flags.weights and key.startswith(OPTIMIZER_PREFIX))
        }
        info = contents.manifest.info
        write_full_tensors(
            final, tensors, plain_state(contents), info, num_files=max(1, flags.files)
        )
        name = final.name.removeprefix("iter_")
        if name == commit.RELEASE or name.isdecimal():
            commit.write_tracker(out, name if name == commit.RELEASE else int(name))
    size = sum(t.num_bytes for t in tensors.values())
    print(f"{final}: {len(tensors)} tensors, {size_text(size)}")
    return 0
