"""Look into checkpoints, check them, and compare them.

    python tools/checkpoint.py inspect SAVE [--tensors] [--args]   what is there
    python tools/checkpoint.py diff SAVE_A SAVE_B                  settings and tensors that differ
    python tools/checkpoint.py verify SAVE [--all]                 read all bytes; exit 1 if damaged
    python tools/checkpoint.py digest SAVE [--weights] [--each]    equal state, equal digest

SAVE is one checkpoint (SAVE/iter_0000100) or a save directory, whose newest one is taken. The
digest does not depend on the layout that saved the state, nor on padding of the vocabulary.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections import Counter
from pathlib import Path
from typing import Any

sys.path.append(os.path.join(os.path.dirname(os.path.abspath(__file__)), os.pardir))

from megatron.core.dist_checkpointing import commit
from megatron.core.dist_checkpointing.digest import checkpoint_digest, tensor_digests
from megatron.core.dist_checkpointing.exchange import SingleProcess
from megatron.core.dist_checkpointing.loader import Contents, open_contents
from megatron.core.dist_checkpointing.manifest import METADATA_NAME
from megatron.core.dist_checkpointing.verify import verify_checkpoint
from megatron.core.errors import CheckpointError

OPTIMIZER_PREFIX = "optimizer."


def checkpoint_in(path: Path) -> Path:
    """Return `path` if it is a checkpoint, else the newest one in it."""
    if (path / METADATA_NAME).exists():
        return path
    found = commit.list_checkpoints(path).checkpoints
    if not found:
        raise CheckpointError(f"{path} holds no checkpoint.", fix="give SAVE or SAVE/iter_NNNNNNN")
    return found[0].path


def opened(path: Path) -> Contents:
    """Open a checkpoint in this process alone."""
    return open_contents(checkpoint_in(path), peers=SingleProcess())


def size_text(num_bytes: int) -> str:
    """Return a size for people: 1.5 GiB."""
    size, unit = float(num_bytes), "B"
    for larger in ("KiB", "MiB", "GiB", "TiB"):
        if size < 1024:
            break
        size, unit = size / 1024, larger
    return f"{size:.0f} B" if unit == "B" else f"{size:.1f} {unit}"


def inspect(arguments: argparse.Namespace) -> int:
    """Print what a save directory and one checkpoint of it contain."""
    path = Path(arguments.path)
    if not (path / METADATA_NAME).exists():
        listing = commit.list_checkpoints(path)
        print(f"{path}: tracker says {commit.read_tracker(path)}")
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
    files = manifest.files.values()
    print(f"  files: {len(manifest.files)}, {size_text(sum(f.size for f in files))}")
    weights = [t for key, t in tensors.items() if not key.startswith(OPTIMIZER_PREFIX)]
    rest = [t for key, t in tensors.items() if key.startswith(OPTIMIZER_PREFIX)]
    for what, group in (("weights", weights), ("optimizer", rest)):
        dtypes = Counter(t.dtype for t in group)
        shown = ", ".join(f"{n} {dtype}" for dtype, n in sorted(dtypes.items()))
        print(f"  {what}: {size_text(sum(t.num_bytes for t in group))} ({shown or 'none'})")
    if arguments.tensors:
        width = max(map(len, tensors), default=0)
        for key, tensor in tensors.items():
            shape = "x".join(map(str, tensor.shape)) or "scalar"
            size = size_text(tensor.num_bytes)
            print(
                f"    {key:{width}}  {tensor.dtype:5} {shape:>20} {size:>10} "
                f"{len(tensor.shards)} shards"
            )
    if arguments.args:
        for name, value in sorted(settings_of(state).items()):
            print(f"    {name} = {value!r}")
    return 0


def settings_of(state: dict[str, Any]) -> dict[str, Any]:
    """Return the settings of the run that saved a state."""
    args = state.get("args")
    return vars(args) if isinstance(args, argparse.Namespace) else {}


def diff(arguments: argparse.Namespace) -> int:
    """Print settings and tensors in which two checkpoints differ; exit 1 if any do."""
    both = [opened(Path(p)) for p in (arguments.path, arguments.other)]
    settings = [settings_of(contents.common_state()) for contents in both]
    num_found = 0
    for name in sorted(settings[0].keys() | settings[1].keys()):
        values = [s.get(name, "absent") for s in settings]
        if values[0] != values[1]:
            num_found += 1
            print(f"{name}: {values[0]!r} -> {values[1]!r}")
    kinds = [
        {key: (t.dtype, t.shape) for key, t in contents.manifest.tensors.items()}
        for contents in both
    ]
    for key in sorted(kinds[0].keys() | kinds[1].keys()):
        pair = [kind.get(key) for kind in kinds]
        if pair[0] != pair[1]:
            num_found += 1
            print(f"{key}: {pair[0] or 'absent'} -> {pair[1] or 'absent'}")
    if arguments.contents:
        digests = [dict(tensor_digests(contents)) for contents in both]
        for key in sorted(digests[0].keys() & digests[1].keys()):
            if kinds[0][key] == kinds[1][key] and digests[0][key] != digests[1][key]:
                num_found += 1
                print(f"{key}: contents differ")
    print(f"{num_found} differences")
    return int(num_found > 0)


def verify(arguments: argparse.Namespace) -> int:
    """Read every byte; print what is wrong."""
    path = Path(arguments.path)
    paths = [checkpoint_in(path)]
    if arguments.all:
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


def digest(arguments: argparse.Namespace) -> int:
    """Print the layout-free digest."""
    path = checkpoint_in(Path(arguments.path))
    if arguments.each:
        for key, value in tensor_digests(opened(path)):
            print(f"{value}  {key}")
        return 0
    only_weights = arguments.weights
    value = checkpoint_digest(
        path,
        only=lambda key: not (only_weights and key.startswith(OPTIMIZER_PREFIX)),
        with_plain_state=not only_weights,
    )
    print(f"{value}  {path}")
    return 0


def main(argv: list[str] | None = None) -> int:
    """Run one subcommand and return the exit status."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    commands = parser.add_subparsers(dest="command", required=True)
    for function in (inspect, diff, verify, digest):
        command = commands.add_parser(function.__name__, help=function.__doc__)
        command.add_argument("path", help="a checkpoint, or a save directory")
        command.set_defaults(run=function)
        if function is inspect:
            command.add_argument("--tensors", action="store_true", help="list every tensor")
            command.add_argument("--args", action="store_true", help="list the saved settings")
        elif function is diff:
            command.add_argument("other", help="the second one")
            command.add_argument("--contents", action="store_true", help="compare values as well")
        elif function is verify:
            command.add_argument("--all", action="store_true", help="every checkpoint of SAVE")
        else:
            command.add_argument("--weights", action="store_true", help="the model alone")
            command.add_argument("--each", action="store_true", help="one digest per tensor")
    arguments = parser.parse_args(argv)
    try:
        status: int = arguments.run(arguments)
    except CheckpointError as error:
        print(error, file=sys.stderr)
        return 1
    return status


if __name__ == "__main__":
    sys.exit(main())
