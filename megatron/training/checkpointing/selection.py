"""Select the checkpoint to load, usually the newest intact one, and log the reason.

The tracker file names the newest checkpoint. After a crash between the rename of a checkpoint and
the write of the tracker, the tracker names an older one; the checkpoint was written later, and is
loaded. If the tracker was written later than a newer checkpoint, a person has set it back, and
newer checkpoints are ignored.

If a directory contains or contained a checkpoint, a run never starts from random weights: an
unusable directory is an error.
"""

from __future__ import annotations

import os
from dataclasses import dataclass, field
from pathlib import Path

from megatron.core.dist_checkpointing import commit
from megatron.core.dist_checkpointing.interop.opening import (
    LATEST_NAME,
    find_deepspeed,
    is_checkpoint,
)
from megatron.core.dist_checkpointing.manifest import MANIFEST_NAME, METADATA_NAME
from megatron.core.dist_checkpointing.object_store import StoragePath
from megatron.core.dist_checkpointing.save_lock import SAVE_LOCK_NAME
from megatron.core.foundation.errors import CheckpointError, MissingCheckpointError

_WEIGHT_FILES = (".pt", ".pth", ".ckpt", ".distcp", ".safetensors", ".safetensors.index.json")
"""Suffixes of files with weights of any program."""


@dataclass
class Selection:
    """Checkpoints to try, best first, and log lines about the selection."""

    candidates: list[commit.FoundCheckpoint] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    is_set_back: bool = False
    """Whether a person wrote an earlier iteration into the tracker file."""


def select_checkpoints(
    directory: StoragePath, ckpt_step: int | None, *, save: str | None = None
) -> Selection:
    """Return the checkpoints of a `--load` directory to try, in order.

    Args:
        ckpt_step: only this iteration, if given.
        save: the run's save directory, which may contain logs before the first checkpoint. Any
            other directory must contain a checkpoint or be empty.
    Returns:
        no candidates if the directory is empty or missing.
    Raises:
        CheckpointError: the directory is a file, has no checkpoint of `ckpt_step`, or contains
            other files or damaged checkpoints only.
    """
    selection = Selection()
    if isinstance(directory, Path):
        _refuse_a_file(directory)
    listing = commit.list_checkpoints(directory)
    # A stray file of another program is ignored if there are checkpoints of ours.
    is_own = bool(listing.checkpoints) and not _holds(directory, METADATA_NAME)
    if not is_own and is_checkpoint(directory):
        # --load names a single checkpoint instead of its parent directory.
        selection.candidates.append(commit.FoundCheckpoint(directory, commit.RELEASE))
        return selection
    tracker = commit.read_tracker(directory, selection.notes)
    selection.notes += [f"ignoring {p}: an interrupted save or deletion" for p in listing.leftovers]
    selection.notes += [f"ignoring {p}: {why}" for p, why in listing.refused]
    selection.candidates = listing.checkpoints or find_deepspeed(directory)
    if ckpt_step is not None:
        _only_step(selection, directory, ckpt_step)
    if not selection.candidates:
        is_own = save is not None and (os.path.realpath(str(directory)) == os.path.realpath(save))
        _refuse_if_something_was_here(directory, listing, tracker, is_own=is_own)
        return selection
    if ckpt_step is None and tracker is not None:
        _follow_tracker(selection, directory, tracker)
    return selection


def _follow_tracker(selection: Selection, directory: StoragePath, tracker: int | str) -> None:
    """Remove checkpoints of later iterations that were saved before the tracker was written."""
    found = selection.candidates
    newer = [one for one in found if _age(one.iteration) > _age(tracker)]
    if tracker not in {one.iteration for one in found}:
        selection.notes.append(f"{commit.TRACKER_NAME} names {tracker}, which does not exist")
    elif newer:
        written = _time_of(directory, commit.TRACKER_NAME)
        later = [one for one in newer if _time_of(one.path, MANIFEST_NAME) >= written]
        selection.candidates = later + [one for one in found if one not in newer]
        selection.is_set_back = not later
        first = selection.candidates[0].path.name
        why = f"and was set after {newer[0].path.name} was saved: loading {first}"
        if later:
            why = f"but {first} was saved after it and is tried first"
        selection.notes.append(
            f"{commit.TRACKER_NAME} names {tracker}, {why} (--ckpt-step loads another)"
        )


def _time_of(directory: StoragePath, name: str) -> float:
    """Return the modification time of a file in a directory, or of a directory without the file."""
    if not isinstance(directory, Path):
        return directory.time_of(name)
    file = directory / name
    return (file if file.exists() else directory).stat().st_mtime


def _refuse_a_file(directory: Path) -> None:
    there = next(p for p in (directory, *directory.absolute().parents) if os.path.lexists(p))
    if not there.is_dir():
        what = "broken link" if there.is_symlink() and not there.exists() else "file"
        raise _unusable(directory, f"{there} is a {what}, not a directory")


def _holds(directory: StoragePath, name: str) -> bool:
    if isinstance(directory, Path):
        return (directory / name).exists()
    return directory.has(name)


def _age(iteration: int | str) -> int:
    """Return a number that orders iterations; a release is older than all iterations."""
    return iteration if isinstance(iteration, int) else -1


def _only_step(selection: Selection, directory: StoragePath, step: int) -> None:
    there = [found.iteration for found in selection.candidates]
    selection.candidates = [f for f in selection.candidates if f.iteration == step]
    if not selection.candidates:
        shown = ", ".join(map(str, there[:10])) or "none"
        raise MissingCheckpointError(
            f"{directory} has no checkpoint of iteration {step}; it has: {shown}.",
            flags=["--ckpt-step", "--load"],
            fix="name one of these iterations, or leave --ckpt-step out to load the newest",
        )


def _refuse_if_something_was_here(
    directory: StoragePath,
    listing: commit.CheckpointListing,
    tracker: int | str | None,
    *,
    is_own: bool,
) -> None:
    """Raise unless no run has saved into the directory yet."""
    if listing.refused:
        reasons = "; ".join(f"{path.name}: {why}" for path, why in listing.refused)
        raise _unusable(directory, reasons)
    if tracker is not None:
        raise _unusable(
            directory, f"{commit.TRACKER_NAME} names {tracker}, but there is no checkpoint"
        )
    if not isinstance(directory, Path) or not directory.is_dir():
        return
    left = {path.name for path in listing.leftovers} | {SAVE_LOCK_NAME}
    names = {entry.name for entry in directory.iterdir()} - left
    if LATEST_NAME in names and any(name.startswith("global_step") for name in names):
        raise _unusable(directory, "it is a DeepSpeed directory without a complete tag")
    if {"config.json", "model.safetensors"} <= names or "model.safetensors.index.json" in names:
        raise _unusable(directory, "it is a Hugging Face checkpoint: convert it first")
    strange = sorted(n for n in names if not is_own or n.endswith(_WEIGHT_FILES))
    if strange:
        shown = ", ".join(strange[:5]) + (", ..." if len(strange) > 5 else "")
        raise _unusable(directory, f"it contains {shown} and no checkpoint")


def missing(directory: str) -> CheckpointError:
    """Return the error of --exit-on-missing-checkpoint."""
    return MissingCheckpointError(
        f"{directory} contains no checkpoint.",
        flags=["--load", "--exit-on-missing-checkpoint"],
        fix="leave --exit-on-missing-checkpoint out to start from random weights",
    )


def moved_away(directory: StoragePath) -> CheckpointError | None:
    """Return the error for a save directory that does not exist any more."""
    if not isinstance(directory, Path) or directory.is_dir():
        return None
    return CheckpointError(
        f"{directory} existed when this run began, and does not exist any more.",
        rule="the checkpoints of a run stay in one directory",
        flags=["--save"],
        fix="move the directory back; a restarted run makes a new one",
    )


def missing_pretrained(directory: str) -> CheckpointError:
    """Return the error for a --pretrained-checkpoint that is empty or missing."""
    return MissingCheckpointError(
        f"{directory} contains no checkpoint.",
        flags=["--pretrained-checkpoint"],
        fix="give the directory that contains iter_* or release",
    )


def _unusable(directory: StoragePath, why: str) -> CheckpointError:
    return CheckpointError(
        f"nothing in {directory} can be loaded: {why}.",
        rule="a run never starts from random weights where a checkpoint was expected",
        flags=["--load"],
        fix="repair or move the directory, or leave --load out to start from random weights",
    )


def no_intact_checkpoint(
    directory: StoragePath, problems: list[CheckpointError]
) -> CheckpointError:
    """Return the error for a directory whose checkpoints are all damaged."""
    reasons = "\n".join(f"  - {problem.found}" for problem in problems)
    return CheckpointError(
        f"no checkpoint in {directory} is intact:\n{reasons}",
        rule="a run never starts from random weights where a checkpoint was expected",
        flags=["--load"],
        fix="restore the files from a copy, or leave --load out to start from random weights",
    )
