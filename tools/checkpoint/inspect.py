"""Print the contents of a save directory and of one of its checkpoints."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

from megatron.core.dist_checkpointing import commit
from megatron.core.dist_checkpointing.interop.contents import InteropContents
from megatron.core.dist_checkpointing.object_store import storage_path
from tools.checkpoint.opening import (
    OPTIMIZER_PREFIX,
    PathFlags,
    data_of,
    is_checkpoint,
    opened,
    settings_of,
    size_text,
)


@dataclass(frozen=True, kw_only=True)
class Flags(PathFlags):
    """Contents to list."""

    tensors: bool = False
    """List every tensor."""
    args: bool = False
    """List the saved settings."""


def run(flags: Flags) -> int:
    """Print the contents and return 0."""
    path = storage_path(flags.path)
    if not is_checkpoint(path):
        listing = commit.list_checkpoints(path)
        print(f"{path}: tracker names {commit.read_tracker(path)}")
        for found in listing.checkpoints:
            print(f"  {found.path.name}")
        for leftover in listing.leftovers:
            print(f"  {leftover.name}: left by an interrupted save or deletion")
    contents = opened(path)
    manifest, state = contents.manifest, contents.common_state()
    tensors = manifest.tensors
    print(f"\n{contents.directory}")
    for name, value in manifest.info.get("versions", {}).items():
        print(f"  {name}: {value}")
    print(f"  layout: {manifest.info.get('layout', 'unknown')}")
    for name in ("iteration", "consumed_train_samples", "num_floating_point_operations_so_far"):
        if name in state:
            print(f"  {name}: {state[name]}")
    for name, value in data_of(state).items():
        print(f"  {name}: {value}")
    if isinstance(contents, InteropContents):
        print(f"  format: {contents.kind}")
    else:
        files = manifest.files.values()
        print(f"  files: {len(manifest.files)}, {size_text(sum(f.size for f in files))}")
    weights = [t for key, t in tensors.items() if not key.startswith(OPTIMIZER_PREFIX)]
    rest = [t for key, t in tensors.items() if key.startswith(OPTIMIZER_PREFIX)]
    for what, group in (("weights", weights), ("optimizer", rest)):
        dtypes = Counter(t.dtype for t in group)
        shown = ", ".join(f"{n} {dtype}" for dtype, n in sorted(dtypes.items()))
        print(f"  {what}: {size_text(sum(t.num_bytes for t in group))} ({shown or 'none'})")
    if flags.tensors:
        width = max(map(len, tensors), default=0)
        for key, tensor in tensors.items():
            shape = "x".join(map(str, tensor.shape)) or "scalar"
            size = size_text(tensor.num_bytes)
            print(
                f"    {key:{width}}  {tensor.dtype:5} {shape:>20} {size:>10} "
                f"{len(tensor.shards)} shards"
            )
    if flags.args:
        for name, value in sorted(settings_of(state).items()):
            print(f"    {name} = {value!r}")
    return 0
