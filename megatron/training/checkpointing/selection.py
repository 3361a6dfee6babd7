"""Which checkpoint to load: the newest intact one, and the reason is said.

The tracker names the newest one. It names an older one after a crash between the rename of a
checkpoint and the write of the tracker: the checkpoint is the later of the two, and is loaded.
Where the tracker is the later one, a person has set it back: checkpoints that are newer than the
one it names are left alone.

A directory that holds, or held, a checkpoint never leads to a start from random weights: if
nothing in it can be used, that is an error.
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
"""Ends of names that mean weights, of whatever program."""


@dataclass
class Selection:
    """What may be loaded, best first, and what to say about it."""

    candidates: list[commit.FoundCheckpoint] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    is_set_back: bool = False
    """A person wrote an earlier iteration into the tracker."""


def select_checkpoints(
    directory: StoragePath, ckpt_step: int | None, *, save: str | None = None
) -> Selection:
    """Look at a `--load` directory and return the checkpoints to try in order.

    Args:
        ckpt_step: only this iteration, if given.
        save: where the run saves. Before its first save, logs of the run may be there already;
            any other directory that a user names holds a checkpoint or nothing.
    Returns:
        no candidates if the directory is empty or absent.
    Raises:
        CheckpointError: it is a file, the step is not there, or it holds or held something and
            no checkpoint that can be read.
    """
    selection = Selection()
    if isinstance(directory, Path):
        _refuse_a_file(directory)
    listing = commit.list_checkpoints(directory)
    # In addition to checkpoints, a stray file of another program does not count.
    is_own = bool(listing.checkpoints) and not _holds(directory, METADATA_NAME)
    if not is_own and is_checkpoint(directory):
        # --load names one checkpoint itself.
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
    """Leave out checkpoints that are newer than the one that the tracker names, unless they were
    saved after it was written."""
    found = selection.candidates
    newer = [one for one in found if _age(one.iteration) > _age(tracker)]
    if tracker not in {one.iteration for one in found}:
        selection.notes.append(f"{commit.TRACKER_NAME} names {tracker}, which is not there")
    elif newer:
        written = _time_of(directory, commit.TRACKER_NAME)
        later = [one for one in newer if _time_of(one.path, MANIFEST_NAME) >= written]
        selection.candidates = later + [one for one in found if one not in newer]
        selection.is_set_back = not later
        first = selection.candidates[0].path.name
        why = f"and was set after {newer[0].path.name} was saved: loading {first}"
        if later:
            why = f"but {first} was saved after it: trying that one first"
        selection.notes.append(
            f"{commit.TRACKER_NAME} names {tracker}, {why} (--ckpt-step loads another)"
        )


def _time_of(directory: StoragePath, name: str) -> float:
    """Return when a file in a directory was written, or the directory if it lacks the file."""
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
    """Return a number that orders iterations; a release comes before all."""
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
    """Raise if the directory is not simply one that no run has saved to yet."""
    if listing.refused:
        reasons = "; ".join(f"{path.name}: {why}" for path, why in listing.refused)
        raise _unusable(directory, reasons)
    if tracker is not None:
        raise _unusable(
            directory, f"{commit.TRACKER_NAME} names {tracker}, and no checkpoint is there"
        )
    if not isinstance(directory, Path) or not directory.is_dir():
        return
    left = {path.name for path in listing.leftovers} | {SAVE_LOCK_NAME}
    names = {entry.name for entry in directory.iterdir()} - left
    if LATEST_NAME in names and any(name.startswith("global_step") for name in names):
        raise _unusable(directory, "it is DeepSpeed's, and no tag in it is complete")
    if {"config.json", "model.safetensors"} <= names or "model.safetensors.index.json" in names:
        raise _unusable(directory, "it is a Hugging Face checkpoint: convert it first")
    strange = sorted(n for n in names if not is_own or n.endswith(_WEIGHT_FILES))
    if strange:
        shown = ", ".join(strange[:5]) + (", ..." if len(strange) > 5 else "")
        raise _unusable(directory, f"it holds {shown} and no checkpoint")


def missing(directory: str) -> CheckpointError:
    """Return the error of --exit-on-missing-checkpoint."""
    return MissingCheckpointError(
        f"{directory} holds no checkpoint.",
        flags=["--load", "--exit-on-missing-checkpoint"],
        fix="leave --exit-on-missing-checkpoint out to start from random weights",
    )


def moved_away(directory: StoragePath) -> CheckpointError | None:
    """Return the error for a save directory that is not there any more."""
    if not isinstance(directory, Path) or directory.is_dir():
        return None
    return CheckpointError(
        f"{directory} was there when this run began, and is not any more.",
        rule="the checkpoints of a run stay together",
        flags=["--save"],
        fix="move the directory back; a run that is started again makes a new one",
    )


def missing_pretrained(directory: str) -> CheckpointError:
    """Return the error for a --pretrained-checkpoint that is empty or absent."""
    return MissingCheckpointError(
        f"{directory} holds no checkpoint.",
        flags=["--pretrained-checkpoint"],
        fix="give the directory that contains iter_* or release",
    )


def _unusable(directory: StoragePath, why: str) -> CheckpointError:
    return CheckpointError(
        f"nothing in {directory} can be loaded: {why}.",
        rule="a run never starts from random weights where a checkpoint was expected",
        flags=["--load"],
        fix="repair or move the directory, or leave --load out to start afresh",
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
        fix="restore the files from a copy, or leave --load out to start afresh",
    )
