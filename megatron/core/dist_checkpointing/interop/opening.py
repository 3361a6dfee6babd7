"""Recognise the program that wrote a checkpoint by its files, and open it."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable
from pathlib import Path

from megatron.core.dist_checkpointing.collective import as_checkpoint_error
from megatron.core.dist_checkpointing.commit import RELEASE, Found
from megatron.core.dist_checkpointing.durable import read_inside
from megatron.core.dist_checkpointing.interop.contents import (
    InteropContents,
    listed,
    not_readable,
)
from megatron.core.dist_checkpointing.interop.deepspeed import is_deepspeed, open_deepspeed
from megatron.core.dist_checkpointing.interop.legacy import is_legacy, open_legacy
from megatron.core.dist_checkpointing.interop.torch_dist import open_torch_dist
from megatron.core.dist_checkpointing.loader import Contents, open_contents
from megatron.core.dist_checkpointing.manifest import BACKEND, METADATA_NAME
from megatron.core.dist_checkpointing.object_store import StoragePath, storage_path
from megatron.core.foundation.errors import CheckpointError, MegatronError, shown
from megatron.core.transport.object_collectives import ControlGroup

Opener = Callable[[Path], InteropContents]

MEGATRON_FORMATS = ("torch_dist", "zarr", "torch_dcp", "fsdp_dtensor")
"""Names in Megatron-LM's metadata.json."""
LATEST_NAME = "latest"
"""DeepSpeed's tracker: the name of a directory."""
_TAG = re.compile(r"[\w.-]{1,200}", re.ASCII)


def recognise(directory: StoragePath) -> Opener | None:
    """Return what opens a checkpoint of another program; None if it is not one.

    Checkpoints of other programs are read from file systems, not from object stores.

    Raises:
        CheckpointError: it is one of a kind that cannot be read.
    """
    if not isinstance(directory, Path):
        return None
    names = set(listed(directory))
    backend = _backend(directory) if METADATA_NAME in names else None
    if backend == "torch_dist" or (backend is None and ".metadata" in names):
        if ".metadata" not in names:
            raise not_readable(directory, ".metadata is missing", "fetch it, or save it again")
        return open_torch_dist
    if backend is not None and backend != BACKEND:
        raise not_readable(
            directory,
            f"it is a Megatron-LM checkpoint of the format {shown(backend, 40)}",
            "convert it there: --ckpt-convert-format torch_dist",
        )
    if backend is None and is_legacy(directory):
        return open_legacy
    if backend is None and is_deepspeed(directory):
        return open_deepspeed
    return None


def find_deepspeed(directory: StoragePath) -> list[Found]:
    """Return the tags of a DeepSpeed save directory, best first: the newest, then older ones."""
    if not isinstance(directory, Path) or LATEST_NAME not in listed(directory):
        return []
    try:
        latest = read_inside(directory, LATEST_NAME, limit_bytes=4096).decode("utf-8").strip()
    except (CheckpointError, UnicodeDecodeError):
        latest = ""
    found = []
    for name in listed(directory):
        if _TAG.fullmatch(name) is None or not is_deepspeed(directory / name):
            continue
        if (directory / name).is_symlink():
            continue
        digits = re.search(r"(\d+)$", name)
        found.append(Found(directory / name, int(digits[1]) if digits else RELEASE))
    return sorted(
        found,
        key=lambda f: (f.path.name == latest, f.iteration if isinstance(f.iteration, int) else -1),
        reverse=True,
    )


def _backend(directory: Path) -> str | None:
    try:
        form = json.loads(read_inside(directory, METADATA_NAME, limit_bytes=1 << 16))
    except (CheckpointError, ValueError, RecursionError):
        return BACKEND  # the native reader says what is wrong with it
    backend = form.get("sharded_backend") if isinstance(form, dict) else None
    # A name that nobody uses is damage, of which the native reader speaks, too.
    return backend if backend in MEGATRON_FORMATS else BACKEND


def open_any(directory: str | os.PathLike[str] | StoragePath, *, peers: ControlGroup) -> Contents:
    """Open a checkpoint, whoever wrote it: collective.

    The coordinator recognises it and reads its description; every rank goes on with the same.

    Raises:
        CheckpointError: on every rank.
    """
    path, problem, contents = storage_path(directory), None, None
    if peers.rank == 0:
        try:
            if isinstance(path, Path):
                path = path.resolve() if path.is_symlink() else path
                opener = recognise(path)
                contents = None if opener is None else opener(path)
        except MegatronError as error:
            problem = error
        except Exception as error:  # agreed on like every other problem: a lone raise is a hang
            problem = as_checkpoint_error(error, f"opening {path}")
    problem, contents = peers.broadcast((problem, contents))
    if problem is not None:
        raise problem
    return open_contents(directory, peers=peers) if contents is None else contents
