"""Recognise the program that wrote a checkpoint by its files, open it, and write its format."""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Callable
from pathlib import Path

from megatron.core.dist_checkpointing import commit
from megatron.core.dist_checkpointing.collective import run_on_coordinator
from megatron.core.dist_checkpointing.commit import RELEASE, FoundCheckpoint
from megatron.core.dist_checkpointing.durable import read_inside, rename_durably, sync_directory
from megatron.core.dist_checkpointing.interop.contents import (
    CheckpointFormat,
    listed,
    not_readable,
)
from megatron.core.dist_checkpointing.interop.formats import FORMATS
from megatron.core.dist_checkpointing.interop.formats.deepspeed import is_deepspeed
from megatron.core.dist_checkpointing.interop.formats.torch_dist import megatron_format
from megatron.core.dist_checkpointing.loader import Contents, open_contents
from megatron.core.dist_checkpointing.manifest import METADATA_NAME
from megatron.core.dist_checkpointing.object_store import StoragePath, storage_path
from megatron.core.foundation.errors import CheckpointError, shown
from megatron.core.transport.object_collectives import ControlGroup

Opener = Callable[[Path], Contents]
LATEST_NAME = "latest"
"""DeepSpeed's tracker: the name of a directory."""
_TAG = re.compile(r"[\w.-]{1,200}", re.ASCII)


def recognise(directory: StoragePath) -> Opener | None:
    """Return the function that opens a checkpoint of another program; None for other directories.

    Checkpoints of other programs are read from file systems, not from object stores.

    Raises:
        CheckpointError: its format is not supported.
    """
    if not isinstance(directory, Path):
        return None
    if METADATA_NAME in listed(directory):
        backend = megatron_format(directory)
        if backend is None:
            return None
        if backend != "torch_dist":
            raise not_readable(
                directory,
                f"it is a Megatron-LM checkpoint of the format {shown(backend, 40)}",
                "convert it there: --ckpt-convert-format torch_dist",
            )
    return next((form.open for form in FORMATS if form.recognises(directory)), None)


def is_checkpoint(directory: StoragePath) -> bool:
    """Return whether a path is one checkpoint, of any program, and not a directory of several."""
    if not isinstance(directory, Path):
        return directory.has(METADATA_NAME)
    return (directory / METADATA_NAME).exists() or recognise(directory) is not None


def find_deepspeed(directory: StoragePath) -> list[FoundCheckpoint]:
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
        found.append(FoundCheckpoint(directory / name, int(digits[1]) if digits else RELEASE))
    return sorted(
        found,
        key=lambda f: (f.path.name == latest, f.iteration if isinstance(f.iteration, int) else -1),
        reverse=True,
    )


def open_any(directory: str | os.PathLike[str] | StoragePath, *, peers: ControlGroup) -> Contents:
    """Open a checkpoint of any program: collective.

    The coordinator recognises it and reads its description, which all ranks then use.

    Raises:
        CheckpointError: on every rank.
    """

    def open_foreign() -> Contents | None:
        path = storage_path(directory)
        if not isinstance(path, Path):
            return None
        path = path.resolve() if path.is_symlink() else path
        opener = recognise(path)
        return None if opener is None else opener(path)

    contents = run_on_coordinator(peers, open_foreign, doing="opening", path=directory)
    return open_contents(directory, peers=peers) if contents is None else contents


def write_format(
    contents: Contents, save: Path, form: CheckpointFormat, *, with_optimizer: bool = True
) -> Path:
    """Write `contents` as SAVE/iter_N and name it in SAVE's tracker; this process alone.

    Args:
        contents: any checkpoint that can be opened.
        save: directory to write into; a checkpoint of the same iteration must not be there.
        with_optimizer: also write the optimizer state, if there is any.
    Returns:
        the directory of the checkpoint.
    Raises:
        CheckpointError: it exists already, or cannot be written.
    """
    assert form.write is not None, form.name
    iteration = int(contents.common_state().get("iteration", 0))
    final = save / commit.iteration_directory(iteration)
    if final.exists():
        raise CheckpointError(
            f"{final} exists already.",
            rule="an export never overwrites a checkpoint",
            fix="give another directory",
        )
    commit.make_directory(save)
    staging = commit.staging_directory(final, "0")
    shutil.rmtree(staging, ignore_errors=True)
    try:
        staging.mkdir()
        form.write(contents, staging, with_optimizer)
        sync_directory(staging)
        rename_durably(staging, final)
    except BaseException:
        shutil.rmtree(staging, ignore_errors=True)
        raise
    commit.write_tracker(save, iteration)
    return final
