"""Rules about optimizers, their state, and loss scaling."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

from megatron.core.dist_checkpointing.object_store import is_url
from megatron.core.foundation.errors import ConfigError, MegatronError, MissingInputError
from megatron.core.optimizer.definitions import OPTIMIZERS
from megatron.core.optimizer.param_groups import parse_rule
from megatron.core.settings.flags import kebab
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
