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
def checkpoints_have_a_place(run: ResolvedRun) -> Iterator[MegatronError]:
    """Flags of saving and loading name a directory."""
    checkpoint = run.checkpoint
    if checkpoint.save_hf is not None and checkpoint.save is None:
        yield problem(
            "--save-hf without --save.",
            "a model is exported from a checkpoint of the run",
            "--save-hf",
            "--save",
            fix="add --save DIRECTORY",
        )
    if checkpoint.save_hf is not None and os.path.exists(checkpoint.save_hf):
        yield problem(
            f"--save-hf {checkpoint.save_hf} exists already.",
            "an export never writes over files",
            "--save-hf",
            fix="name a new directory",
        )
    keep, every = checkpoint.save_retain_interval, checkpoint.save_interval
    if keep and every and keep % every:
        yield problem(
            f"--save-retain-interval {keep} is no multiple of --save-interval {every}.",
            "only what was saved can be kept",
            "--save-retain-interval",
            "--save-interval",
            fix=f"use --save-retain-interval {every * 10}",
        )
    wants_load = [
        flag
        for flag, is_given in (
            ("--ckpt-step", checkpoint.ckpt_step),
            ("--use-checkpoint-args", checkpoint.use_checkpoint_args),
            ("--exit-on-missing-checkpoint", checkpoint.exit_on_missing_checkpoint),
        )
        if is_given
    ]
    if checkpoint.finetune and checkpoint.pretrained_checkpoint is None:
        wants_load.append("--finetune")
    if wants_load and checkpoint.load is None:
        yield problem(
            f"{wants_load[0]} without --load.",
            "there is nothing to load from",
            *wants_load,
            "--load",
            fix="add --load DIRECTORY",
        )
    if (
        run.schedule.override_opt_param_scheduler
        and run.schedule.use_checkpoint_opt_param_scheduler
    ):
        yield problem(
            "--override-opt-param-scheduler and --use-checkpoint-opt-param-scheduler are both on.",
            "on resume one of the two schedules wins",
            "--override-opt-param-scheduler",
            "--use-checkpoint-opt-param-scheduler",
            fix="keep --override-opt-param-scheduler",
        )


@rule
def spikes_are_looked_for_and_answered(run: ResolvedRun) -> Iterator[MegatronError]:
    """--on-spike has something to answer, and a rollback has a state to return to."""
    schedule, checkpoint = run.schedule, run.checkpoint
    if schedule.on_spike == "warn":
        return
    asked = f"--on-spike {schedule.on_spike}"
    if not (schedule.check_for_spiky_loss or run.ddp.check_for_large_grads):
        yield problem(
            f"{asked} without a check.",
            "a check finds what the policy answers",
            "--on-spike",
            "--check-for-spiky-loss",
            "--check-for-large-grads",
            fix="add --check-for-spiky-loss, --check-for-large-grads or both",
        )
    if schedule.on_spike != "rollback":
        return
    saves = checkpoint.save is not None and (
        checkpoint.save_interval or checkpoint.non_persistent_save_interval
    )
    if not saves and not run.logging.inprocess_restart:
        yield problem(
            f"{asked} in a run that keeps no state.",
            "a run returns to a checkpoint, or with --inprocess-restart to a copy in memory",
            "--on-spike",
            "--save",
            "--save-interval",
            fix="add --save DIRECTORY --save-interval 100",
        )
    if checkpoint.no_save_optim:
        yield problem(
            f"{asked} with --no-save-optim.",
            "a run returns to the optimizer state of an earlier step as well",
            "--on-spike",
            "--no-save-optim",
            fix="leave --no-save-optim out",
        )
    if run.data.dataloader_type == "external":
        yield problem(
            f"{asked} with --dataloader-type external.",
            "samples are read again from an earlier place",
            "--on-spike",
            "--dataloader-type",
            fix="use --dataloader-type single or cyclic, or --on-spike skip",
        )


@rule
def what_is_loaded_is_there(run: ResolvedRun) -> Iterator[MegatronError]:
    """--load names a checkpoint, or a directory that waits for the first one.

    The same look as before loading, here before anything is built; ranks that see different disks
    find out when they compare settings.
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
    """A profile starts before it ends."""
    logging = run.logging
    if logging.profile and not 0 < logging.profile_step_start < logging.profile_step_end:
        yield problem(
            f"--profile-step-start {logging.profile_step_start} --profile-step-end"
            f" {logging.profile_step_end}.",
            "0 < start < end",
            "--profile-step-start",
            "--profile-step-end",
            fix="use --profile-step-start 10 --profile-step-end 12",
        )
    wrong = [rank for rank in logging.profile_ranks if not 0 <= rank < run.topology.world_size]
    if wrong:
        yield problem(
            f"--profile-ranks names rank {wrong[0]} of {run.topology.world_size}.",
            "ranks are counted from 0",
            "--profile-ranks",
            fix="use --profile-ranks 0",
        )


@rule
def names_of_a_wandb_run(run: ResolvedRun) -> Iterator[MegatronError]:
    """A project has named runs."""
    if run.logging.wandb_project and not run.logging.wandb_exp_name:
        yield problem(
            "--wandb-project without --wandb-exp-name.",
            "a run has a name",
            "--wandb-project",
            "--wandb-exp-name",
            fix="add --wandb-exp-name NAME",
        )
