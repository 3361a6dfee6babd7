"""Measured runs: their settings and the seconds of their steps."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum
from pathlib import Path

import numpy as np

from megatron.core.distributed.distributed_data_parallel_config import SHARDING_STRATEGIES
from megatron.core.foundation.errors import ConfigError
from megatron.core.settings.flags import FlagSpec
from megatron.training.checkpointing.stored_settings import stored_args
from megatron.training.cli.parser import ParsedCommand
from megatron.training.config.resolved import ResolvedRun, resolve_vocabulary
from megatron.training.config.run import RunConfig, all_flags
from megatron.training.reports import STEP_TIME, read_run
from megatron.training.rules import resolve_and_check
from megatron_lattice.planner.hardware import Gpu
from megatron_lattice.planner.run_workload import kind_of_modules, workload_of_run
from megatron_lattice.planner.workload import Workloads

WARM_UP_STEPS = 2
"""Number of first steps to skip: they also allocate memory and compile kernels."""

_NOT_TAKEN = {
    "load", "save", "data_path", "train_data_path", "valid_data_path", "test_data_path", "split",
    "train_samples", "lr_decay_samples", "lr_warmup_samples",
}  # fmt: skip
"""Settings that name files of another machine, or that resolution derives from other settings."""


@dataclass(frozen=True)
class MeasuredRun:
    """A run and the median seconds of its steps."""

    name: str
    run: ResolvedRun
    step_s: float


def measured_runs(paths: Sequence[Path]) -> list[MeasuredRun]:
    """Read runs, see `measured_run`."""
    return [measured_run(path) for path in paths]


def measured_run(path: Path) -> MeasuredRun:
    """Read the scalars of a run, and its settings from a checkpoint.

    Args:
        path: directory with the file of `--metrics-jsonl` (or TensorBoard's) and the checkpoint, or
            one above both.
    Raises:
        DataError: there are no scalars of one run.
        ConfigError: no settings, or too few steps.
    """
    record = read_run(path)
    times = record.series.get(STEP_TIME)
    seconds = [] if times is None else [s for s in times.values[WARM_UP_STEPS:] if s > 0]
    if not seconds:
        raise ConfigError(
            f"{path} has no step after the first {WARM_UP_STEPS}.",
            rule="a calibration is the median time of the steps after the warm-up steps",
            flags=["--metrics-jsonl", "--train-iters"],
            fix=f"train {WARM_UP_STEPS + 5} steps or more with --metrics-jsonl FILE",
        )
    stored = stored_args(str(record.checkpoints[-1].path.parent)) if record.checkpoints else None
    if stored is None:
        raise ConfigError(
            f"{path} has no checkpoint.",
            rule="the settings of a measured run are read from its checkpoint",
            flags=["--save"],
            fix="train it with --save in the same directory",
        )
    known = {
        name: _value(all_flags()[name], value)
        for name, value in vars(stored).items()
        if name in all_flags() and name not in _NOT_TAKEN and not all_flags()[name].metadata.refuse
    }
    config = RunConfig.from_values(known | {"mock_data": True})
    command = ParsedCommand(config=config, given=frozenset(known))
    run = resolve_and_check(lambda: command, lambda _: record.num_ranks or 1)
    rows = int(vars(stored)["unpadded_vocab_size"])
    return MeasuredRun(str(path), resolve_vocabulary(run, rows), statistics.median(seconds))


def _value(spec: FlagSpec, stored: object) -> object:
    """Convert a stored value to the flag's type: checkpoints store enums by name."""
    if isinstance(stored, str) and issubclass(spec.element, Enum):
        return spec.element.__members__[stored]
    return stored


def row_of_run(run: ResolvedRun, gpu: Gpu) -> Workloads:
    """Return model, batch and layout of a run as a table of one row, without blanks.

    Schedules other than 1F1B count as 1F1B, and stages as equal.

    Args:
        run: resolved for all of its ranks, with its vocabulary.
        gpu: with its usual build of NVLink and NICs.
    Raises:
        ConfigError: the planner has no constants for its precision.
    """
    model = workload_of_run(run, gpu, run.topology.world_size)
    sizes, batch = run.parallelism, run.schedule
    chunks = run.transformer_config.virtual_pipeline_model_parallel_size or 1
    kind, share = _recomputation(run, chunks)
    numbers = {
        "tensor_size": sizes.tensor_model_parallel_size,
        "pipeline_size": sizes.pipeline_model_parallel_size,
        "num_chunks": chunks,
        "context_size": sizes.context_parallel_size,
        "expert_size": sizes.expert_model_parallel_size,
        "expert_tensor_size": sizes.expert_tensor_parallel_size or 1,
        "data_size": run.topology.data_parallel_size,
        "micro_batch_size": batch.micro_batch_size,
        "global_batch_size": batch.global_batch_size,
        "sharding_stage": SHARDING_STRATEGIES.index(run.ddp.data_parallel_sharding_strategy),
        "recompute_share": share,
        "sequence_parallel": sizes.sequence_parallel,
        "may_interleave": chunks > 1,
        "must_interleave": chunks > 1,
    }
    columns = {name: np.array([float(number)]) for name, number in numbers.items()}
    return model.replace(**columns, recompute=np.array([kind], dtype="<U16"))


def _recomputation(run: ResolvedRun, chunks: int) -> tuple[str, float]:
    """Return the planner's kind of recomputation, and the share of recomputed layers."""
    settings = run.precision
    if settings.recompute_granularity is None:
        return "none", 1.0
    if settings.recompute_granularity == "full":
        stages = run.parallelism.pipeline_model_parallel_size * chunks
        layers = run.transformer_config.num_layers / stages
        chosen = settings.recompute_num_layers
        is_part = settings.recompute_method == "block" and chosen is not None
        return "full", min(1.0, (chosen or 0) / layers) if is_part else 1.0
    return kind_of_modules(settings.recompute_modules or ["core_attn"]), 1.0
