"""Rules about checkpoints, logs and profiles."""

from __future__ import annotations

import os
from collections.abc import Iterator

from megatron.core.dist_checkpointing.durable import describe_os_error
from megatron.core.dist_checkpointing.object_store import storage_path
from megatron.core.foundation.errors import MegatronError
from megatron.training.checkpointing.selection import (
    missing,
    missing_pretrained,
    select_checkpoints,
)
from megatron.training.config.resolved import ResolvedRun
from megatron.training.rules.registry import problem, rule


@rule
def exports_have_a_place(run: ResolvedRun) -> Iterator[MegatronError]:
    """Check that an export does not overwrite files."""
    checkpoint = run.checkpoint
    if checkpoint.save_hf is not None and os.path.exists(checkpoint.save_hf):
        yield problem(
            f"--save-hf {checkpoint.save_hf} exists already.",
            "an export never overwrites files",
            fix="name a new directory",
        )


@rule
def what_is_loaded_is_there(run: ResolvedRun) -> Iterator[MegatronError]:
    """Check that the directories to load from contain a checkpoint.

    Loading checks the same; this check is made before the model is built. If ranks read different
    disks, the comparison of settings reports it.
    """
    checkpoint = run.checkpoint
    try:
        if checkpoint.load is not None:
            own = select_checkpoints(
                storage_path(checkpoint.load),
                checkpoint.ckpt_step,
                save=checkpoint.save,
            )
            if own.candidates:
                return
        if checkpoint.pretrained_checkpoint is not None:
            if not select_checkpoints(
                storage_path(checkpoint.pretrained_checkpoint), None
            ).candidates:
                yield missing_pretrained(checkpoint.pretrained_checkpoint)
        elif checkpoint.load is not None and checkpoint.exit_on_missing_checkpoint:
            yield missing(checkpoint.load)
    except MegatronError as error:
        yield error
    except OSError as error:
        yield describe_os_error(error, path=error.filename or "--load", doing="reading")


@rule
def profiles_have_a_range(run: ResolvedRun) -> Iterator[MegatronError]:
    """Check the range of profiled steps and ranks."""
    logging = run.logging
    if logging.profile and not 0 < logging.profile_step_start < logging.profile_step_end:
        yield problem(
            f"--profile-step-start {logging.profile_step_start} --profile-step-end"
            f" {logging.profile_step_end}.",
            "0 < start < end",
            fix="use --profile-step-start 10 --profile-step-end 12",
        )
    wrong = [rank for rank in logging.profile_ranks if not 0 <= rank < run.topology.world_size]
    if wrong:
        yield problem(
            f"--profile-ranks names rank {wrong[0]} of {run.topology.world_size}.",
            "ranks are numbered from 0",
            fix="use --profile-ranks 0",
        )
