"""Predict the cost of one step of a run, on GPUs or on this machine.

`tools/plan.py step` and the log of a run use it.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

from megatron.core.foundation import device
from megatron.core.foundation.errors import ConfigError, MegatronError
from megatron.training.cli.parser import ParsedCommand, parse_command_line
from megatron.training.config.resolved import ResolvedRun
from megatron.training.metrics.prediction import StepPrediction
from megatron.training.setup.traced_rank import ModelScript
from megatron_lattice import read_deepspeed_config
from megatron_lattice.planner.autofill import SAFE_SHARE
from megatron_lattice.planner.cluster_calibration import calibrate_to_machine, calibrate_to_runs
from megatron_lattice.planner.hardware import Gpu, gpu_named
from megatron_lattice.planner.machine_time import work_of_step
from megatron_lattice.planner.measured_run import MeasuredRun, measured_runs, row_of_run
from megatron_lattice.planner.memory import GIB, predict_memory
from megatron_lattice.planner.predictor import load_predictor
from megatron_lattice.planner.search_command import WITHOUT_A_RUN, Cluster, resolved_for
from megatron_lattice.planner.step_time import Parts, predict_step
from megatron_lattice.planner.work import OperationTimes, work_of_ranks


def step_text(
    words: Sequence[str],
    cluster: Cluster | None,
    world_size: int,
    script: ModelScript,
    calibration: Sequence[Path],
) -> str:
    """Return the predicted cost of a step of `pretrain_gpt.py WORDS`.

    Args:
        cluster: the GPUs; None for gloo on this machine.
        calibration: directories of runs that were measured on them.
    Raises:
        MegatronError: a rule of a run is broken, or a step cannot be predicted.
    """
    command = parse_command_line(
        list(words), args_defaults=WITHOUT_A_RUN, deepspeed_reader=read_deepspeed_config
    )
    run, measured = resolved_for(command, {}, world_size), measured_runs(calibration)
    if cluster is None:
        return str(predicted_step_of_machine(run, script, measured, os.cpu_count() or 1))
    gpu = cluster.build(load_predictor().hardware)
    prediction, parts = predicted_step(run, gpu, measured)
    return f"{prediction}\n{parts}{_memory_warning(prediction.memory_bytes or 0.0, gpu)}"


def _memory_warning(needed: float, gpu: Gpu) -> str:
    """Return a line of text if a rank needs more than the usable memory of its GPU."""
    if needed <= SAFE_SHARE * gpu.memory_bytes:
        return ""
    return (
        f"\nwarning: {needed / GIB:.1f} GiB do not fit: an {gpu.name} has"
        f" {gpu.memory_bytes / GIB:.0f} GiB, and fragmentation leaves"
        f" {100 * SAFE_SHARE:.0f} % of them; tools/plan.py search finds a layout that fits"
    )


def prediction_for_log(
    command: ParsedCommand, world_size: int, script: ModelScript, *, is_shown: bool
) -> StepPrediction | None:
    """Return the predicted step time that the log of a run shows.

    On GPUs, the planner's constants predict it; on other machines, runs of that machine, which
    --calibrate-planner names. Call it before process groups are created.

    Args:
        is_shown: whether this rank writes the log; other ranks only read the measured runs.
    Raises:
        ConfigError: a measured run cannot be read.
    """
    calibration = [Path(name) for name in command.config.logging.calibrate_planner or ()]
    measured = measured_runs(calibration)
    if not is_shown:
        return None
    try:
        run = resolved_for(command, {}, world_size)
        if device.device_type() == "cuda":
            return predicted_step(run, gpu_of_this_machine(), measured)[0]
    except MegatronError:
        # Resolving the command for training reports its mistakes. A run for which the planner has
        # no constants gets no prediction.
        return None
    return predicted_step_of_machine(run, script, measured, os.cpu_count() or 1)


def gpu_of_this_machine() -> Gpu:
    """Return the data sheet of this process' accelerator; see `gpu_of_card`."""
    return gpu_of_card(device.device_name())


def gpu_of_card(name: str) -> Gpu:
    """Return the data sheet of a card by the name that its driver gives it.

    Raises:
        ConfigError: the planner has no constants for it.
    """
    hardware = load_predictor().hardware
    known = [kind for kind in hardware.gpus if kind in name]
    return gpu_named(max(known, key=len, default=name), hardware)


def predicted_step(
    run: ResolvedRun, gpu: Gpu, measured: Sequence[MeasuredRun] = ()
) -> tuple[StepPrediction, str]:
    """Predict a step on GPUs; return it, and its parts as text.

    Args:
        run: resolved for all of its ranks, with its vocabulary.
        gpu: GPU of the cluster, with its network.
        measured: runs of the cluster.
    Raises:
        ConfigError: the planner has no constants for the precision.
    """
    predictor = calibrate_to_runs(load_predictor(), measured, gpu)
    row = row_of_run(run, gpu)
    seconds = predictor.seconds(row)
    off = float(predictor.interval(row)[0])
    parts = Parts.of(predict_step(row, predictor.hardware), seconds)
    lines = [f"  {1e3 * column[0]:>10.1f} ms  {name}" for name, column in parts.columns.items()]
    prediction = StepPrediction(
        seconds=float(seconds[0]),
        low_s=float(seconds[0]) / off,
        high_s=float(seconds[0]) * off,
        memory_bytes=float(predict_memory(row, predictor.hardware).total[0]),
        basis=_basis(measured),
    )
    return prediction, "\n".join(lines)


def predicted_step_of_machine(
    run: ResolvedRun, script: ModelScript, measured: Sequence[MeasuredRun], cores: int
) -> StepPrediction:
    """Predict a step on gloo of this machine, from the runs `measured` of this machine.

    Raises:
        ConfigError: `measured` is empty.
        TopologyError: this process is a rank of a run.
    """
    if not measured:
        raise ConfigError(
            "no measured run of this machine.",
            rule="the constants of a machine without GPUs are fitted to measured steps",
            flags=["--calibrate"],
            fix="train a few steps with --metrics-jsonl RUN/metrics.jsonl --save RUN, and name RUN",
        )
    times = OperationTimes()
    machine = calibrate_to_machine(measured, script, cores, times)
    work = work_of_step(run, work_of_ranks(run, script), cores, times)
    low, high = machine.interval(work)
    return StepPrediction(
        seconds=machine.seconds(work),
        low_s=low,
        high_s=high,
        memory_bytes=None,
        basis=_basis(measured),
    )


def _basis(measured: Sequence[MeasuredRun]) -> str:
    return f"calibrated to {', '.join(run.name for run in measured) or 'published steps'}"
