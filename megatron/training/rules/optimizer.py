"""Rules about optimizers, their state, and loss scaling."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import torch

from megatron.core.dist_checkpointing.object_store import is_url
from megatron.core.foundation.errors import ConfigError, MegatronError, MissingInputError
from megatron.core.optimizer.definitions import OPTIMIZERS
from megatron.core.optimizer.param_groups import parse_rule
from megatron.core.settings.flags import kebab
from megatron.training.config.resolved import ResolvedRun
from megatron.training.rules.registry import problem, rule


@rule
def optimizer_numbers(run: ResolvedRun) -> Iterator[MegatronError]:
    """Check the ranges of the optimizer's constants."""
    asked = run.optimizer
    for flag, value in (
        ("--adam-beta1", asked.adam_beta1),
        ("--adam-beta2", asked.adam_beta2),
        ("--sgd-momentum", asked.sgd_momentum),
        ("--lion-beta1", asked.lion_beta1),
        ("--lion-beta2", asked.lion_beta2),
        ("--muon-momentum", asked.muon_momentum),
    ):
        if not 0 <= value < 1:
            yield problem(f"{flag} {value:g}.", "it is in [0, 1)", flag, fix=f"use {flag} 0.9")
    for text in asked.param_rules:
        try:
            parse_rule(text)
        except ConfigError as error:
            yield error
    for flag, value in (
        ("--adam-eps", asked.adam_eps),
        ("--weight-decay", asked.weight_decay),
        ("--clip-grad", asked.clip_grad),
        ("--muon-extra-scale-factor", asked.muon_extra_scale_factor),
    ):
        if not value >= 0:
            yield problem(f"{flag} {value:g}.", "it is not negative", flag, fix=f"drop {flag}")


@rule
def optimizer_state_has_a_place(run: ResolvedRun) -> Iterator[MegatronError]:
    """Check the dtypes and the storage of optimizer state."""
    optimizer, precision = run.optimizer, run.precision
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
            "--optimizer",
            fix=f"drop {' and '.join(names)}; --use-distributed-optimizer shards its state",
        )
    if not 0.0 <= optimizer.optimizer_offload_fraction <= 1.0:
        yield problem(f"--optimizer-offload-fraction {optimizer.optimizer_offload_fraction:g}.",
                      "a share is in [0, 1]", "--optimizer-offload-fraction",
                      fix="drop it to offload everything")  # fmt: skip
    halves = precision.bf16 or precision.fp16
    if optimizer.main_params_dtype == torch.float16 and not (compact and halves):
        yield problem(
            "--main-params-dtype fp16 with fp32 weights.",
            "half-precision weights have separate main weights; fp32 weights do not",
            "--main-params-dtype",
            "--bf16",
            fix="drop --main-params-dtype",
        )


@rule
def loss_scale_may_fall(run: ResolvedRun) -> Iterator[MegatronError]:
    """Check the ranges of the constants of loss scaling."""
    optimizer = run.optimizer
    if optimizer.loss_scale is not None and not optimizer.loss_scale > 0:
        yield problem(f"--loss-scale {optimizer.loss_scale:g}.", "a loss scale is positive",
                      "--loss-scale", fix="drop it to scale dynamically")  # fmt: skip
    if not 0 < optimizer.min_loss_scale <= optimizer.initial_loss_scale:
        yield problem(
            f"--min-loss-scale {optimizer.min_loss_scale:g} with --initial-loss-scale"
            f" {optimizer.initial_loss_scale:g}.",
            "the initial loss scale is at least the minimum, which is positive",
            "--min-loss-scale",
            "--initial-loss-scale",
            fix=f"use --min-loss-scale {min(1.0, max(optimizer.initial_loss_scale, 2.0**-10)):g}",
        )
    if optimizer.loss_scale_window < 1:
        yield problem(f"--loss-scale-window {optimizer.loss_scale_window:g}.",
                      "it counts steps and is at least 1", "--loss-scale-window",
                      fix="drop --loss-scale-window")  # fmt: skip


@rule
def checkpoints_have_copies(run: ResolvedRun) -> Iterator[MegatronError]:
    """Check that replication makes at least one copy."""
    checkpoint = run.checkpoint
    if checkpoint.replication_factor < 2:
        yield problem(
            f"--replication-factor {checkpoint.replication_factor}, "
            f"--replication-jump {checkpoint.replication_jump}.",
            "at least one copy, on another rank",
            "--replication-factor", "--replication-jump",
            fix="use --replication-factor 2",
        )  # fmt: skip


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
