"""Scaling curves, what a training costs, and their pictures."""

import csv
import shlex
from pathlib import Path

import numpy as np
import pytest

from megatron.core.foundation.errors import ConfigError
from megatron.core.foundation.exit_status import ExitStatus
from megatron_lattice.planner.autofill import autofill
from megatron_lattice.planner.predictor import load_predictor
from megatron_lattice.planner.roofline import roofline_of
from megatron_lattice.planner.scaling import MODELS, ScalingFlags
from megatron_lattice.planner.scaling_command import scaled_models
from megatron_lattice.planner.step_time import predict_step
from megatron_lattice.planner.timeline import timeline_of
from megatron_lattice.planner.training_cost import (
    Failures,
    Prices,
    best_interval,
    slowdown,
    training_cost,
    young_interval,
)
from megatron_lattice.planner.workload import Workloads
from tests.unit.planner.test_planner import rows_of
from tools import plan

HARDWARE = load_predictor().hardware
LLAMA_8B = "--preset llama3-8b --bf16 --seq-length 8192 --global-batch-size 64"


@pytest.mark.parametrize(
    ("checkpoint_s", "mtbf_s"), [(5.0, 20_000.0), (60.0, 11_000.0), (300.0, 3_600.0)]
)
def test_the_interval_is_the_one_that_loses_least(checkpoint_s: float, mtbf_s: float) -> None:
    intervals = np.geomspace(checkpoint_s, 5 * mtbf_s, 4000)
    lost = [slowdown(interval, checkpoint_s, 120.0, mtbf_s) for interval in intervals]
    found = best_interval(checkpoint_s, mtbf_s)
    assert slowdown(found, checkpoint_s, 120.0, mtbf_s) == pytest.approx(min(lost), rel=1e-3)
    assert found == pytest.approx(intervals[np.argmin(lost)], rel=0.03)
    # In first order the checkpoint itself does not count.
    assert found < young_interval(checkpoint_s, mtbf_s)


def test_the_slowdown_is_what_drawn_failures_cost() -> None:
    interval, checkpoint, restart, mtbf = 1000.0, 50.0, 100.0, 5000.0
    draw = np.random.default_rng(5)
    done, spent = 0, 0.0
    while done < 20_000:
        to_failure = draw.exponential(mtbf)
        if to_failure >= interval + checkpoint:
            spent, done = spent + interval + checkpoint, done + 1
            continue
        spent += to_failure
        while (again := draw.exponential(mtbf)) < restart:  # restarts fail too
            spent += again
        spent += restart
    expected = slowdown(interval, checkpoint, restart, mtbf)
    assert spent / (done * interval) == pytest.approx(expected, rel=0.01)


def test_a_training_costs_hours_energy_money_and_emissions() -> None:
    """Llama 3.1 405B, its model card: 30.84 million hours of 700 W are 8,930 t of CO2."""
    cost = training_cost(
        step_s=10.0,
        num_steps=30.84e6 * 360 / 16384,
        num_gpus=16384,
        watts=700,
        failures=Failures(gpu_mtbf_hours=1e12, checkpoint_s=1e-6, restart_s=0),
        prices=Prices(
            node_overhead=1.0, pue=1.0, price_per_gpu_hour=2.0, grid_kg_co2_per_kwh=0.4137
        ),
    )
    assert cost.gpu_hours == pytest.approx(30.84e6, rel=1e-3)
    assert cost.kg_co2 == pytest.approx(8.93e6, rel=0.01)
    assert cost.money == pytest.approx(61.68e6, rel=1e-3)
    assert cost.days == pytest.approx(30.84e6 / 16384 / 24, rel=1e-3)


def test_more_gpus_fail_more_often_and_lose_more() -> None:
    lost = [
        training_cost(
            step_s=5.0, num_steps=1e5, num_gpus=count, watts=700, failures=Failures(),
            prices=Prices(),
        ).lost_share
        for count in (8, 1024, 16384)
    ]  # fmt: skip
    assert lost[0] < 0.01 < lost[1] < lost[2] < 0.2


def test_published_models_have_the_parameters_of_their_names() -> None:
    for model in scaled_models(ScalingFlags(gpu="H100")):
        row = model.row
        layers = (
            row.num_layers * row.dense_params + row.num_tables * row.vocab_size * row.hidden_size
        )
        assert float(layers[0]) / 1e9 == pytest.approx(float(model.name[:-1]), rel=0.05)
    assert list(MODELS)[0] == "1.7B"
    with pytest.raises(ConfigError, match="2B"):
        scaled_models(ScalingFlags(gpu="H100", models=("2B",)))


def test_the_command_writes_curves_and_pictures(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    output = tmp_path / "curves.csv"
    words = f"scaling --gpu H100 --models 1.7B --num-gpus 8 64 --pictures {tmp_path}"
    words += f" --output {output} --price-per-gpu-hour 2 --grid-kg-co2-per-kwh 0.4"
    assert plan.main(shlex.split(words)) == ExitStatus.DONE
    assert "1.7B, strong scaling on H100" in capsys.readouterr().out
    rows = list(csv.DictReader(output.read_text().splitlines()))
    assert [row["scaling"] for row in rows] == ["strong", "strong", "weak", "weak"]
    assert [row["global_batch_size"] for row in rows] == ["2048", "2048", "8", "64"]
    assert float(rows[0]["efficiency"]) == 1.0 > float(rows[1]["efficiency"])
    assert float(rows[1]["money"]) == pytest.approx(2 * float(rows[1]["gpu_hours"]), rel=1e-4)
    assert_pictures(tmp_path, ["scaling"])


def assert_pictures(directory: Path, names: list[str]) -> None:
    for name in names:
        assert (directory / f"{name}.png").read_bytes().startswith(b"\x89PNG")


def test_a_search_and_traced_memory_are_drawn(tmp_path: Path) -> None:
    words = f"search --gpu H100 --num-gpus 16 --pictures {tmp_path} {LLAMA_8B}"
    words += " --tensor-model-parallel-size 2"
    assert plan.main(shlex.split(words)) == ExitStatus.DONE
    assert_pictures(tmp_path, ["search", "step", "roofline"])
    words = (
        f"memory --num-gpus 2 --pictures {tmp_path} --num-layers 2 --hidden-size 64"
        " --num-attention-heads 4 --seq-length 32 --vocab-size 128 --micro-batch-size 1"
        " --global-batch-size 4 --pipeline-model-parallel-size 2"
    )
    assert plan.main(shlex.split(words)) == ExitStatus.DONE
    assert_pictures(tmp_path, ["memory"])


@pytest.mark.parametrize("chunks", ["1", "5"])
def test_the_timeline_takes_as_long_as_the_model_says(chunks: str) -> None:
    """Where nothing is hidden; the closed form has no place for what is between the stages."""
    row = rows_of(VPP=chunks, GBS="16")
    timeline = timeline_of(row, HARDWARE)
    assert timeline.num_microbatches == row.num_microbatches[0]
    assert {bar.rank for bar in timeline.bars} == set(range(4))
    longest = max(bar.end for bar in timeline.bars)
    assert longest == pytest.approx(float(predict_step(row, HARDWARE).total[0]), rel=0.1)


@pytest.mark.parametrize("changes", [{}, {"attention": "unfused"}, {"precision": "fp8"}])
def test_no_operator_is_above_the_roof(changes: dict[str, str]) -> None:
    row: Workloads = autofill(rows_of(**changes), HARDWARE)
    roofline = roofline_of(row, HARDWARE)
    for point in roofline.points:
        rate = point.flops / point.seconds
        assert rate <= roofline.peak_flops
        assert point.num_bytes / point.seconds <= roofline.bytes_per_s, point.name
