"""The planner for a cluster on which runs were measured, and what the log says of it."""

import os
import shlex
import statistics
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from megatron.core.foundation.errors import ConfigError
from megatron.training.config.resolved import ResolvedRun
from megatron.training.metrics.prediction import StepPrediction
from megatron.training.reports import read_run
from megatron_lattice.planner.cluster_calibration import calibrate_to_runs
from megatron_lattice.planner.hardware import gpu_named
from megatron_lattice.planner.layout_space import LAYOUT_COLUMNS, Choices, layout_space
from megatron_lattice.planner.measured_run import MeasuredRun, measured_run, row_of_run
from megatron_lattice.planner.predictor import load_predictor
from megatron_lattice.planner.run_workload import settings_of_layout
from megatron_lattice.planner.search_command import words_of_flag
from tests.harness.pool import REPOSITORY
from tests.harness.resolved_run import run_of
from tests.unit.planner.test_layout_search import EXPERTS, LLAMA_8B, model_of, row_of

PREDICTOR = load_predictor()
H100 = gpu_named("H100", PREDICTOR.hardware)
NUM_RANKS = 16
SMALL = (
    "--num-layers 1 --hidden-size 32 --num-attention-heads 2 --seq-length 16 --vocab-size 64"
    " --max-position-embeddings 16 --micro-batch-size 1 --global-batch-size 4 --lr 1e-3"
    " --mock-data --eval-iters 1 --num-workers 0"
)


def run_with(settings: Mapping[str, Any], words: str = LLAMA_8B) -> ResolvedRun:
    flags = [word for name, value in settings.items() for word in words_of_flag(name, value)]
    return run_of(f"{words} {shlex.join(flags)}", NUM_RANKS)


@pytest.mark.parametrize("words", [LLAMA_8B, EXPERTS], ids=["dense", "experts"])
def test_the_row_of_a_run_is_that_of_the_layout_it_was_made_of(words: str) -> None:
    table = layout_space(model_of(words, NUM_RANKS), Choices()).table
    for index in np.random.default_rng(4).choice(len(table), 12, replace=False):
        expected = row_of(table, index)
        settings = settings_of_layout(expected, has_dispatcher=False)
        settings.pop("global_batch_size")
        found = row_of_run(run_with(settings, words), H100)
        for name in (*LAYOUT_COLUMNS, "sequence_parallel", "global_batch_size", "world_size"):
            ours, theirs = getattr(found, name)[0], getattr(expected, name)[0]
            # Layers that are recomputed are whole.
            assert ours == (
                pytest.approx(theirs, abs=0.25) if name == "recompute_share" else theirs
            ), name


def test_a_slower_cluster_is_predicted_slower_for_layouts_that_it_has_not_run() -> None:
    slowness = 1.25
    layouts = [
        {"tensor_model_parallel_size": tp, "micro_batch_size": 1, "use_distributed_optimizer": True}
        for tp in (2, 4, 8)
    ]
    runs = [run_with(layout) for layout in layouts]
    rows = [row_of_run(run, H100) for run in runs]
    seconds = [float(PREDICTOR.seconds(row)[0]) for row in rows]
    measured = [MeasuredRun("run", run, slowness * s) for run, s in zip(runs, seconds, strict=True)]
    found = calibrate_to_runs(PREDICTOR, measured[:2], H100)
    assert found.seconds(rows[2])[0] / seconds[2] == pytest.approx(slowness, rel=0.06)
    # What is known of this cluster is more than what is known of clusters.
    assert found.interval(rows[2])[0] < PREDICTOR.interval(rows[2])[0]
    contradicting = [measured[0], MeasuredRun("other", runs[1], 0.7 * seconds[1])]
    unsure = calibrate_to_runs(PREDICTOR, contradicting, H100)
    assert unsure.interval(rows[2])[0] > found.interval(rows[2])[0]


def test_measured_steps_of_this_machine_predict_and_are_shown_in_the_log(tmp_path: Path) -> None:
    commands = (
        f"pretrain_gpt.py {SMALL} --train-iters 8 --save run --metrics-jsonl run/metrics.jsonl",
        f"tools/plan.py step --num-gpus 1 --calibrate run {SMALL}",
        f"pretrain_gpt.py {SMALL} --train-iters 2 --log-interval 1 --calibrate-planner run",
    )
    _, planned, log = [printed_by(command, tmp_path) for command in commands]
    found = measured_run(tmp_path / "run")
    seconds = read_run(tmp_path / "run").series["iteration-time"].values
    assert found.step_s == statistics.median(seconds[2:])
    # With one measured run the prediction for its own layout is what it took.
    expected_ms = planned.split()[0]
    assert float(expected_ms) == pytest.approx(1e3 * found.step_s, abs=0.1)
    assert f"> predicted: {expected_ms} ms per step" in log
    assert log.count(f"| predicted (ms): {expected_ms} (") == 2


def printed_by(command: str, directory: Path) -> str:
    script, *flags = shlex.split(command)
    return subprocess.run(
        [sys.executable, str(REPOSITORY / script), *flags],
        cwd=directory, capture_output=True, text=True, timeout=300, check=True,
        env={**os.environ, "PYTHONPATH": str(REPOSITORY)},
    ).stdout  # fmt: skip


def test_a_run_that_says_too_little_is_refused(tmp_path: Path) -> None:
    scalars = tmp_path / "metrics.jsonl"
    line = '{{"iteration": {}, "time": 1.0, "iteration-time": 0.5}}\n'
    scalars.write_text(line.format(1))
    with pytest.raises(ConfigError, match="no step after the first 2"):
        measured_run(tmp_path)
    scalars.write_text("".join(line.format(step) for step in range(1, 6)))
    with pytest.raises(ConfigError, match="has no checkpoint"):
        measured_run(tmp_path)


def test_only_steps_above_the_interval_are_unusual() -> None:
    expected = StepPrediction(seconds=1.0, low_s=0.8, high_s=1.25, memory_bytes=None, basis="rows")
    assert expected.judge(1.2) is None and expected.judge(0.5) is None
    assert "1.50 times as long as predicted" in (expected.judge(1.5) or "")
