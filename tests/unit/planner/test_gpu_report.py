"""`make gpu` runs to its end without a GPU, where its figures mean nothing."""

from __future__ import annotations

import json

import pytest
import torch

from benchmarks.gpu import __main__ as command
from benchmarks.gpu import limits, train
from benchmarks.gpu.processes import Machine
from benchmarks.gpu.report import REHEARSAL, Found
from megatron.core.foundation import device
from megatron.core.foundation.exit_status import ExitStatus
from megatron.planner.hardware import gpu_named
from megatron.planner.measured_run import MeasuredRun
from megatron.planner.predictor import load_predictor
from tests.harness.distributed import distributed

H100 = gpu_named("H100", load_predictor().hardware)


def test_all_parts_are_rehearsed_and_reported(tmp_path, monkeypatch):
    monkeypatch.setenv("LATTICE_DEVICE", "cpu")
    status = command.main(["--rehearse", "--ranks", "1", "--output", str(tmp_path)])
    text = (tmp_path / "report.md").read_text()
    assert status == ExitStatus.DONE, text
    assert text.splitlines()[0] == REHEARSAL
    parts = json.loads((tmp_path / "report.json").read_text())["parts"]
    tables = {f"{part}: {t['title']}": t["rows"] for part in parts for t in parts[part]["tables"]}
    (run,) = tables["train: published models"]
    assert run["peak GiB"] > 0
    assert run["dry run GiB"] > 0
    assert {row["kind"] for row in tables["train: kernels of tiny, dp 1"]} >= {"matrix product"}
    assert {row["precision"] for row in tables["limits: products"]} == {*limits.DTYPES, "fp8"}
    assert [r["candidate"] for r in tables["peers: one model on one accelerator"]] == [
        "lattice, local layers"
    ]
    assert "passed" in tables["tests: the tests of a GPU"][0]["result"] or (
        "skipped" in tables["tests: the tests of a GPU"][0]["result"]
    )
    assert list((tmp_path / "train").glob("*/trace-rank0.json"))
    assert not list(tmp_path.glob("*.partial"))


def test_a_part_that_fails_is_named_and_leaves_the_others_to_run(tmp_path, monkeypatch):
    def fails(machine: Machine) -> Found:
        raise RuntimeError("the device is lost")

    monkeypatch.setenv("LATTICE_DEVICE", "cpu")
    monkeypatch.setitem(command.PARTS, "limits", fails)
    monkeypatch.setitem(command.PARTS, "peers", lambda machine: Found())
    words = ["--rehearse", "--parts", "limits", "peers", "--output", str(tmp_path)]
    assert command.main(words) == ExitStatus.FAILED
    assert "- limits: RuntimeError: the device is lost" in (tmp_path / "report.md").read_text()
    assert set(json.loads((tmp_path / "report.json").read_text())["parts"]) == {"limits", "peers"}


def test_without_an_accelerator_it_says_what_to_do(tmp_path, monkeypatch, capsys):
    monkeypatch.delenv("LATTICE_DEVICE", raising=False)
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: False)
    device.device_type.cache_clear()
    assert command.main(["--output", str(tmp_path / "absent")]) == ExitStatus.WRONG_USAGE
    assert "--rehearse" in capsys.readouterr().err
    assert not (tmp_path / "absent").exists()


@distributed(world_size=2)
def test_ranks_measure_what_they_exchange(groups):
    rows = list(limits.collective_rows(groups.dp, limits.TINY))
    assert [row["collective"] for row in rows] == [
        "all-reduce", "all-gather", "reduce-scatter", "all-to-all",
    ]  # fmt: skip
    assert all(row["ranks"] == 2 and row["GB/s"] > 0 for row in rows)


def test_models_are_chosen_by_the_memory_of_the_dry_run():
    def chosen(gib: float) -> list[str]:
        machine = Machine(ranks=(8,), directory=None, is_rehearsal=False,
                          memory_bytes=gib * 2**30)  # fmt: skip
        return [each.name for each in train.cases(machine)]

    assert chosen(1) == []
    for name in chosen(80):
        assert name.endswith(("dp 8", "tp 8"))
    largest = [each for each in chosen(80) if "tp 8" in each][-1]
    assert largest != chosen(24)[-1]


def test_runs_are_compared_with_their_plan_before_and_after_calibration():
    run = train.case("llama3.2-1b", 8, train.layouts(8)[0], is_tiny=False).resolved()
    row = train.planned(run, H100, 2.0)
    assert row["measured/planned"] == pytest.approx(2000 / row["planned ms"])
    summary, constants = train.after_calibration([MeasuredRun("run", run, 2.0)], H100)
    (after,) = summary.values()
    assert abs(after - 1) < abs(row["measured/planned"] - 1)
    assert constants


def test_rates_are_compared_with_the_data_sheet():
    machine = Machine(ranks=(1,), directory=None, is_rehearsal=False, gpu=H100)
    row = limits.beside_data_sheet(machine, "products", {"precision": "bf16", "TFLOP/s": 494.5})
    assert row["of data sheet"] == pytest.approx(0.5)
    row = limits.beside_data_sheet(machine, "copies", {"copy": "within the device", "GB/s": 1675.0})
    assert row["of data sheet"] == pytest.approx(0.5)
    assert "of data sheet" not in limits.beside_data_sheet(machine, "products", {"error": "no"})
