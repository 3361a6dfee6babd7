"""Functions of several commands: find and open a checkpoint, and format its sizes."""

from __future__ import annotations

import contextlib
import sys
from argparse import Namespace
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megatron.core.dist_checkpointing.interop.opening import is_checkpoint, open_any
from megatron.core.dist_checkpointing.loader import Contents
from megatron.core.dist_checkpointing.object_store import StoragePath
from megatron.core.dist_checkpointing.save_lock import SaveLock
from megatron.core.foundation.errors import CheckpointError
from megatron.core.settings.flags import positional
from megatron.core.transport.object_collectives import SingleProcess
from megatron.training.checkpointing.selection import select_checkpoints

OPTIMIZER_PREFIX = "optimizer."


@dataclass(frozen=True, kw_only=True)
class PathFlags:
    """The flags of a command that works on one checkpoint."""

    path: str = positional()
    """A checkpoint, or a save directory."""


def checkpoint_in(path: StoragePath) -> StoragePath:
    """Return `path` if it is a checkpoint, else the checkpoint in it that a run would load."""
    if is_checkpoint(path):
        return path
    found = select_checkpoints(path, None)
    if not found.candidates:
        raise CheckpointError(f"{path} holds no checkpoint.", fix="give SAVE or SAVE/iter_NNNNNNN")
    if found.is_set_back:
        print(found.notes[-1], file=sys.stderr)
    return found.candidates[0].path


def opened(path: StoragePath) -> Contents:
    """Open a checkpoint in this process alone."""
    return open_any(checkpoint_in(path), peers=SingleProcess())


@contextlib.contextmanager
def held(directory: StoragePath) -> Iterator[None]:
    """Keep runs and other tools from writing to a save directory; object stores have no lock."""
    lock = SaveLock.acquire(directory) if isinstance(directory, Path) else None
    try:
        yield
    finally:
        if lock is not None:
            lock.release()


def settings_of(state: dict[str, Any]) -> dict[str, Any]:
    """Return the settings of the run that saved a state."""
    args = state.get("args")
    return vars(args) if isinstance(args, Namespace) else {}


def data_of(state: dict[str, Any]) -> dict[str, Any]:
    """Return the values that determine the order of training data: fingerprints, seed, ..."""
    found: dict[str, Any] = {}

    def add(name: str, value: Any) -> None:
        if isinstance(value, dict):
            for inner, part in value.items():
                add(f"{name}.{inner}", part)
        elif isinstance(value, (list, tuple)) and any(isinstance(v, dict) for v in value):
            for index, part in enumerate(value):
                add(f"{name}[{index}]", part)
        else:
            found[name] = value

    add("data", state.get("data_order") or {})
    return found


def size_text(num_bytes: int) -> str:
    """Return a size as text: 1.5 GiB."""
    size, unit = float(num_bytes), "B"
    for larger in ("KiB", "MiB", "GiB", "TiB"):
        if size < 1024:
            break
        size, unit = size / 1024, larger
    return f"{size:.0f} B" if unit == "B" else f"{size:.1f} {unit}"
