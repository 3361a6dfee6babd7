"""The commit protocol: a checkpoint appears whole, or not at all.

A save writes into `iter_N.tmp-<run>`; when every byte is on the disk and listed in the manifest,
one rename makes it `iter_N`, and the tracker is replaced by another rename. A crash at any moment
leaves the earlier checkpoints as they were. The tracker is only a hint: a checkpoint exists if its
directory has a matching manifest.

Names in a save directory:
    iter_0000010                    a checkpoint
    iter_0000010.tmp-<run>          unfinished; ignored, reported, removed by the next save
    iter_0000010.replaced-<run>     an older save of the same iteration, being replaced: readable
    iter_0000010.deleting-<run>     being removed by retention
    latest_checkpointed_iteration.txt
"""

from __future__ import annotations

import contextlib
import os
import re
import shutil
from dataclasses import dataclass, field
from pathlib import Path

from megatron.core.dist_checkpointing.durable import (
    DamagedCheckpointError,
    read_inside,
    remove_tree,
    rename_durably,
    replace_durably,
    sync_directory,
)
from megatron.core.dist_checkpointing.manifest import (
    MANIFEST_NAME,
    METADATA_NAME,
    Manifest,
    check_sizes,
    parse_manifest,
    read_manifest_bytes,
)
from megatron.core.dist_checkpointing.object_store import ObjectDirectory, StoragePath
from megatron.core.foundation.errors import CheckpointError

TRACKER_NAME = "latest_checkpointed_iteration.txt"
RELEASE = "release"
_NAME = re.compile(
    r"(?:iter_(\d{7,18})|(release))(?:\.(tmp|replaced|deleting)-([0-9a-f]+))?", re.ASCII
)


def iteration_directory(iteration: int | str) -> str:
    """Return the name of a checkpoint: iter_0000010, or release."""
    return RELEASE if iteration == RELEASE else f"iter_{int(iteration):07d}"


def staging_directory(final: Path, run: str) -> Path:
    """Return where a save of `final` is prepared."""
    return final.with_name(f"{final.name}.tmp-{run}")


def begin(final: Path, run: str) -> Path:
    """Create the staging directory of a save and return it."""
    staging = staging_directory(final, run)
    make_directory(final.parent)
    os.mkdir(staging)
    sync_directory(final.parent)
    return staging


def make_directory(path: Path) -> None:
    """Create a directory and its parents, durably; existing directories are kept."""
    missing = []
    while not path.exists():
        missing.append(path)
        path = path.parent
    for new in reversed(missing):
        with contextlib.suppress(FileExistsError):
            os.mkdir(new)
        sync_directory(new.parent)


def publish(staging: Path, final: Path, run: str) -> None:
    """Turn a complete staging directory into the checkpoint `final`.

    All files are already written and synced. The order matters: first sync the names inside, then
    rename the directory, which makes the checkpoint exist.
    """
    sync_directory(staging)
    if not final.exists() or _is_empty(final):
        rename_durably(staging, final)  # also onto an empty directory that the caller made
        return
    replaced = final.with_name(f"{final.name}.replaced-{run}")
    rename_durably(final, replaced)
    try:
        rename_durably(staging, final)
    except OSError:
        # If the sync after the rename failed, the new checkpoint is in place. If the old one cannot
        # be renamed back, loaders still find it, and the first error is raised.
        if not final.exists():
            with contextlib.suppress(OSError):
                rename_durably(replaced, final)
        raise
    shutil.rmtree(replaced)


def write_tracker(directory: StoragePath, iteration: int | str) -> None:
    """Name the newest checkpoint, for people and for Megatron's own tools."""
    if isinstance(directory, ObjectDirectory):
        directory.write(TRACKER_NAME, str(iteration).encode())
        return
    replace_durably(directory / TRACKER_NAME, str(iteration).encode())


def read_tracker(directory: StoragePath, notes: list[str] | None = None) -> int | str | None:
    """Return the iteration in the tracker, or None if the tracker is missing or unreadable.

    Args:
        notes: receives a line with the reason if the tracker is unreadable.
    """
    notes = [] if notes is None else notes
    try:
        text = read_inside(directory, TRACKER_NAME, limit_bytes=64).decode("ascii").strip()
    except (CheckpointError, UnicodeDecodeError) as error:
        if isinstance(error, UnicodeDecodeError) or os.path.lexists(f"{directory}/{TRACKER_NAME}"):
            reason = error.found if isinstance(error, CheckpointError) else "it is not text"
            notes.append(f"{TRACKER_NAME} cannot be used: {reason}")
        return None
    if text == RELEASE:
        return RELEASE
    if re.fullmatch(r"\d{1,18}", text, re.ASCII):
        return int(text)
    what = f"{text[:40]!r}" if text else "nothing"
    notes.append(f"{TRACKER_NAME} cannot be used: it holds {what}, not a number of iterations")
    return None


@dataclass
class FoundCheckpoint:
    """One checkpoint of a save directory."""

    path: StoragePath
    iteration: int | str
    is_replaced: bool = False
    """An older save of the same iteration, left because its replacement was interrupted."""


@dataclass
class CheckpointListing:
    """What a save directory contains, newest checkpoint first."""

    checkpoints: list[FoundCheckpoint] = field(default_factory=list)
    leftovers: list[StoragePath] = field(default_factory=list)
    """Unfinished saves and deletions of runs that ended."""
    refused: list[tuple[StoragePath, str]] = field(default_factory=list)
    """Checkpoint names that are not directories: (path, why)."""


def list_checkpoints(directory: StoragePath) -> CheckpointListing:
    """List a save directory by its file names; no checkpoint is opened."""
    listing = CheckpointListing()
    if isinstance(directory, ObjectDirectory):
        for name in directory.names():
            match = _NAME.fullmatch(name)
            if match is None or match[3] is not None:
                continue
            stored = directory / name
            if stored.has(METADATA_NAME):
                number = RELEASE if match[1] is None else int(match[1])
                listing.checkpoints.append(FoundCheckpoint(stored, number))
            else:
                listing.leftovers.append(stored)
        return _sorted(listing)
    if not directory.is_dir():
        return listing
    with os.scandir(directory) as scan:
        entries = list(scan)
    for entry in entries:
        match = _NAME.fullmatch(entry.name)
        if match is None:
            continue
        number, _, state, _ = match.groups()
        path = directory / entry.name
        if entry.is_symlink():
            listing.refused.append((path, "it is a symbolic link: give --load its target instead"))
        elif not entry.is_dir():
            listing.refused.append((path, "it is not a directory"))
        elif state in ("tmp", "deleting"):
            listing.leftovers.append(path)
        elif not _is_empty(path):  # an empty one was made by a caller and never filled
            iteration: int | str = RELEASE if number is None else int(number)
            listing.checkpoints.append(FoundCheckpoint(path, iteration, state == "replaced"))
        else:
            listing.leftovers.append(path)
    return _sorted(listing)


def _sorted(listing: CheckpointListing) -> CheckpointListing:
    listing.checkpoints.sort(
        key=lambda f: (-1 if f.iteration == RELEASE else int(f.iteration), not f.is_replaced),
        reverse=True,
    )
    listing.leftovers.sort(key=str)
    return listing


def _is_empty(directory: Path) -> bool:
    with os.scandir(directory) as entries:
        return next(entries, None) is None


def open_checkpoint(directory: StoragePath) -> Manifest:
    """Read and check the manifest of a checkpoint; check that its files exist with their sizes.

    Contents are verified as they are read; `verify.verify_checkpoint` reads all of them.
    """
    if isinstance(directory, Path) and directory.is_symlink() and _NAME.fullmatch(directory.name):
        directory = directory.resolve()
    return read_manifest(directory)[1]


def read_manifest(directory: StoragePath) -> tuple[bytes, Manifest]:
    """Read manifest.json, and check it and the files that it lists; see `open_checkpoint`."""
    if isinstance(directory, Path) and not directory.is_dir():
        raise CheckpointError(f"{directory} is not a directory.", flags=["--load"])
    data = read_manifest_bytes(directory)
    manifest = parse_manifest(data, directory / MANIFEST_NAME)
    here, made_for = _NAME.fullmatch(directory.name), _NAME.fullmatch(manifest.name)
    if here and made_for and (here[1] and int(here[1])) != (made_for[1] and int(made_for[1])):
        raise DamagedCheckpointError(
            f"{directory} holds the checkpoint that was saved as {manifest.name}.",
            rule="a checkpoint keeps the iteration it was saved at",
            fix=f"rename the directory to {manifest.name}",
        )
    check_sizes(directory, manifest)
    return data, manifest


def remove_leftovers(directory: StoragePath) -> list[StoragePath]:
    """Delete the remains of interrupted saves and deletions; call only while holding the lock.

    An object store has no lock, so another run may be writing these files: they stay there until
    the same iteration is saved again.
    """
    if isinstance(directory, ObjectDirectory):
        return []
    listing = list_checkpoints(directory)
    present = {f.iteration for f in listing.checkpoints if not f.is_replaced}
    superseded = [f.path for f in listing.checkpoints if f.is_replaced and f.iteration in present]
    unfinished = [p for p in listing.leftovers if "." in p.name]  # an empty one may be foreign
    leftovers = unfinished + superseded
    for path in leftovers:
        assert isinstance(path, Path)
        remove_tree(path)
    return leftovers


def remove_checkpoint(found: FoundCheckpoint, run: str) -> None:
    """Delete a checkpoint; loaders never find a half-deleted one."""
    if isinstance(found.path, ObjectDirectory):
        found.path.remove(first=METADATA_NAME)
        return
    retired = found.path.with_name(f"{found.path.name}.deleting-{run}")
    remove_tree(found.path, retired_as=None if found.is_replaced else retired)
