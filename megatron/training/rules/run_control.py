"""Rules about optimizers, checkpoints, logs and profiles."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

from megatron.core.dist_checkpointing.durable import describe_os_error
from megatron.core.dist_checkpointing.object_store import is_url, storage_path
from megatron.core.foundation.errors import ConfigError, MegatronError, MissingInputError
from megatron.core.optimizer.definitions import OPTIMIZERS
from megatron.core.optimizer.param_groups import parse_rule
from megatron.core.settings.flags import kebab
from megatron.training.checkpointing.selection import (
    missing,
    missing_pretrained,
    select_checkpoints,
)
from megatron.training.config.resolved import ResolvedRun
from megatron.training.rules.registry import problem, rule


@rule
def rules_of_parameters_are_readable(run: ResolvedRun) -> Iterator[MegatronError]:
    """Check --param-rules."""
    for text in run.optimizer.param_rules:
        try:
            parse_rule(text)
        except ConfigError as error:
            yield error


@rule
def optimizer_state_has_a_place(run: ResolvedRun) -> Iterator[MegatronError]:
    """Check that the optimizer can store its state off the device or in low precision."""
    optimizer = run.optimizer
    offloads = optimizer.optimizer_cpu_offload or optimizer.optimizer_offload_path is not None
    compact = optimizer.use_precision_aware_optimizer
    known = OPTIMIZERS.get(optimizer.optimizer)  # None for a refused name
    if known is not None and known.update is None and (offloads or compact):
        given = [
            ("use_precision_aware_optimizer", compact),
            ("optimizer_cpu_offload", optimizer.optimizer_cpu_offload),
            ("optimizer_offload_path", optimizer.optimizer_offload_path),
        ]
        names = [kebab(name) for name, is_on in given if is_on]
        yield problem(
            f"{names[0]} with --optimizer {optimizer.optimizer}.",
            "only the state of elementwise optimizers can be offloaded or stored in low precision",
            *names,
            fix=f"drop {' and '.join(names)}; --use-distributed-optimizer shards its state",
        )


@rule
def loss_scale_may_fall(run: ResolvedRun) -> Iterator[MegatronError]:
    """Check the smallest loss scale."""
    optimizer = run.optimizer
    if not 0 < optimizer.min_loss_scale <= optimizer.initial_loss_scale:
        yield problem(
            f"--min-loss-scale {optimizer.min_loss_scale:g} with --initial-loss-scale"
            f" {optimizer.initial_loss_scale:g}.",
            "the initial loss scale is at least the minimum, which is positive",
            fix=f"use --min-loss-scale {min(1.0, max(optimizer.initial_loss_scale, 2.0**-10)):g}",
        )


@rule
def directories_can_be_written_to(run: ResolvedRun) -> Iterator[MegatronError]:
    """Check that directories for files are writable."""
    for flag, path in (
        ("--optimizer-offload-path", run.optimizer.optimizer_offload_path),
        ("--param-offload-path", run.ddp.param_offload_path),
    ):
        if path is not None and not _is_writable(Path(path)):
            yield MissingInputError(
                f"{flag} {path} is not a writable directory.",
                rule="the directory exists on every node",
                flags=[flag],
                fix=f"mkdir -p {path}",
            )
    for flag, path in (
        ("--tensorboard-dir", run.logging.tensorboard_dir),
        ("--metrics-jsonl", run.logging.metrics_jsonl),
        ("--data-cache-path", run.data.data_cache_path),
    ):
        if path is None or is_url(path):
            continue
        above = next(parent for parent in Path(path).absolute().parents if parent.exists())
        if not _is_writable(above):
            yield MissingInputError(
                f"{flag} {path}: {above} is not a writable directory.",
                rule="missing directories are created",
                flags=[flag],
                fix=f"drop {flag}, or name a path in a writable directory",
            )


def _is_writable(directory: Path) -> bool:
    return directory.is_dir() and os.access(directory, os.W_OK)


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
