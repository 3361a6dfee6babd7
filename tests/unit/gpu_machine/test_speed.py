"""Stages B and C run to their end without a GPU, where their figures mean nothing."""

import json
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

from benchmarks.gpu import kernels, peers, profile_step, variants, workload
from benchmarks.gpu.forks import Outcome
from benchmarks.gpu.profile_step import busy_us, rows_of, work_of
from megatron_lattice.planner.step_command import gpu_of_card
from tools import gpu_session

REPOSITORY = Path(__file__).resolve().parents[3]


@pytest.mark.parametrize("stage", ["B", "C"])
def test_a_stage_is_rehearsed_by_the_runner(stage, tmp_path):
    words = [stage, "--rehearse", "--seconds", "900", "--out", str(tmp_path)]
    script = [sys.executable, "tools/gpu_session.py", *words]
    done = subprocess.run(script, cwd=REPOSITORY, capture_output=True, text=True)
    found = json.loads((tmp_path / f"{stage}.json").read_text())["checks"]
    rows = {check["check"]: check["rows"] for check in found}
    assert done.returncode == 0, done.stdout
    assert list(rows) == [check.name for check in gpu_session.STAGES[stage]]
    if stage == "B":
        for name in ("ours", "plain"):
            assert rows[name][0]["tokens/s"] > 0
            assert "predicted MFU %" in rows[name][0]
        for name, package in (("hf-liger", "liger_kernel"), ("megatron-core", "megatron-core")):
            assert "ms" in rows[name][0] or package in rows[name][0]["not run"]
        return
    shown = {row["family"]: row["launches"] for row in rows["profile"] if "predicted ms" in row}
    assert set(shown) == set(profile_step.PREDICTED)
    assert all(shown.values())
    assert (tmp_path / "trace.json.gz").stat().st_size > 0
    assert {row["kernel"] for row in rows["kernels"]} == {"copy", *kernels.CASES}
    names = [each.name for each in variants.VARIANTS]
    assert [row["variant"] for row in rows["variants"] if "variant" in row] == names
    estimates = {row["estimate of"]: row for row in rows["variants"] if "estimate of" in row}
    assert set(estimates) == {each.name for each in variants.VARIANTS if not each.before}
    assert all(row["dry run GiB"] is not None for row in estimates.values())
    for row in (*rows["kernels"], *rows["variants"]):
        assert "error" not in row, row


def test_flops_are_those_of_the_formula():
    z = workload.Workload().sizes
    of_layer = 4096 * (4096 + 2 * 1024) + 4096 * 4096 + 3 * 4096 * 14336
    weights = 8 * of_layer + 4096 * 128256
    # Each query of 4,096 sees 2,048 keys on average, in two products of 2 FLOPs a channel.
    attention = 3 * 8 * 2 * 2 * 2048 * 4096
    assert workload.model_flops(z, 8192) == pytest.approx(8192 * (6 * weights + attention))
    assert workload.model_flops(z, 8192) == pytest.approx(118.2e12, rel=1e-3)


def test_a_step_without_a_finite_loss_has_no_row():
    with pytest.raises(RuntimeError, match="loss of the last step is nan"):
        workload.step_row(
            "ours", workload.TINY, torch.device("cpu"), [1.0] * 3, float("nan"), 0, {}
        )


def test_without_a_gpu_a_measurement_ends_with_the_reason(monkeypatch):
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda **_: None)
    with pytest.raises(SystemExit, match="--rehearse"):
        peers.main(["plain-compiled"])


def test_a_missing_package_passes_a_rehearsal_alone(monkeypatch, capsys):
    monkeypatch.delenv(peers.SITE, raising=False)
    monkeypatch.setenv("LATTICE_DEVICE", "cpu")
    monkeypatch.setattr(workload, "choose_device", lambda _: torch.device("cpu"))
    assert peers.main(["megatron-core", "--rehearse"]) == 0
    assert peers.main(["megatron-core"]) == 1
    rows = [json.loads(line[5:]) for line in capsys.readouterr().out.splitlines()]
    assert all("megatron-core is missing" in row["not run"] for row in rows)


class Clock:
    """The time of a check whose steps take the durations of a list."""

    def __init__(self, monkeypatch, limit_s, start_s, durations):
        self.now, self.durations, self.counts = 0.0, iter(durations), []

        def peer(work, device, *, is_rehearsal):
            self.now += start_s
            return {"fast": peers.Measured(self.step), "slow": peers.Measured(self.step, "a note")}

        monkeypatch.setattr(peers.time, "perf_counter", lambda: self.now)
        monkeypatch.setattr(workload, "seconds_left", lambda: limit_s - self.now)
        monkeypatch.setitem(peers.PEERS, "planted", peer)

    def step(self, count):
        self.now += next(self.durations)
        self.counts.append(count)
        return 1.5


@pytest.mark.parametrize(("limit_s", "measured"), [
    (33, {"fast": 1}),  # the third step would end after the limit
    (44, {"fast": 1}),
    (60, {"fast": 4}),
    (90, {"fast": 4, "slow": 2}),
    (900, {"fast": 4, "slow": 4}),
])  # fmt: skip
def test_a_slow_peer_has_a_row_from_the_steps_that_end_before_its_limit(
    limit_s, measured, monkeypatch
):
    clock = Clock(monkeypatch, limit_s, 17.0, [9.0, *[5.0] * 5, 2.0, *[9.0] * 5])
    work = workload.Workload()
    rows = list(peers.measure("planted", work, torch.device("cpu"), is_rehearsal=False))
    assert {row["step"]: row["measured steps"] for row in rows} == measured
    assert clock.now < limit_s
    assert clock.counts[:2] == [1, work.num_micro_batches], "the first step only warms up"
    assert [row.get("note") for row in rows] == [None, "a note"][: len(rows)]


def test_a_check_waits_for_its_turn_and_reads_its_end(monkeypatch, tmp_path):
    assert workload.TURN == gpu_session._TURN
    monkeypatch.delenv(workload.TURN, raising=False)
    workload.wait_for_turn()
    assert workload.seconds_left() == float("inf")
    turn, waits = tmp_path / "turn", []

    def sleep(_):
        waits.append(1)
        if len(waits) == 3:
            turn.write_text(str(time.monotonic() + 100))

    monkeypatch.setenv(workload.TURN, str(turn))
    monkeypatch.setattr(workload.time, "sleep", sleep)
    workload.choose_device(True)
    assert len(waits) == 3
    assert 90 < workload.seconds_left() <= 100


def test_what_does_not_fit_is_tried_with_one_sample(monkeypatch, capsys):
    def measure(name, work, device, *, is_rehearsal):
        if work.micro_batch > 1:
            raise torch.OutOfMemoryError("CUDA out of memory.\nmore")
        yield {"step": name, "tokens": work.tokens}

    again = []
    monkeypatch.setattr(workload, "choose_device", lambda _: torch.device("cpu"))
    monkeypatch.setattr(peers, "measure", measure)
    monkeypatch.setattr(sys, "orig_argv", ["python", "-m", "peers", "megatron-core"])

    def execute(_: str, words: list[str]) -> None:
        again.append(peers.main(words[3:]))
        raise SystemExit  # `execv` does not return

    monkeypatch.setattr(os, "execv", execute)
    with pytest.raises(SystemExit):
        peers.main(["megatron-core"])
    assert again == [0]
    first, second = [json.loads(x[5:]) for x in capsys.readouterr().out.splitlines()]
    assert first["error"] == "CUDA out of memory."
    assert second["tokens"] == workload.Workload().tokens


class Graph:
    """A graph whose capture is refused when the call reads a value."""

    def __init__(self, _pool):
        self.replays = 0

    def capture(self, call):
        if call() == "reads a value":
            raise RuntimeError("operation not permitted when stream is capturing")

    def replay(self):
        self.replays += 1


@pytest.mark.parametrize(("result", "way"), [(None, "graph"), ("reads a value", "calls")])
def test_a_kernel_is_timed_by_a_graph_and_by_calls_if_its_capture_is_refused(
    result, way, monkeypatch
):
    calls, timed = [], []

    def elapsed(_, run, count):
        timed.append((run, count))
        return 2.0

    monkeypatch.setattr(kernels, "DeviceGraph", Graph)
    monkeypatch.setattr(kernels.Bench, "elapsed_ms", elapsed)
    bench = kernels.Bench(workload.TINY.sizes, 1, torch.device("meta"), False)
    assert bench.milliseconds(lambda: calls.append(1) or result) == (2.0, way)
    assert len(calls) == 4  # a warm-up of three calls, and the capture
    assert [count for _, count in timed] == [1, 4, 4, 4]
    assert {hasattr(run, "__self__") for run, _ in timed} == {way == "graph"}


def test_cases_without_time_have_a_row_and_compiled_candidates_are_the_last(monkeypatch, capsys):
    monkeypatch.setenv("LATTICE_DEVICE", "cpu")
    monkeypatch.setattr(workload, "seconds_left", lambda: 5.0)
    monkeypatch.setattr(sys, "argv", ["kernels", "--rehearse", "--only", "gated", "RMSNorm"])
    kernels.main()
    rows = [json.loads(line[5:]) for line in capsys.readouterr().out.splitlines()]
    assert {row["kernel"] for row in rows if "ms" in row} == {"gated", "RMSNorm"}
    lost = [(row["kernel"], row["compiled"]) for row in rows if "compiled" in row]
    assert lost == [("RMSNorm", True), ("gated", True)]


def event(cat, name, begin, dur, **args):
    return {"ph": "X", "cat": cat, "name": name, "ts": begin, "dur": dur, "pid": 1, "tid": 1,
            "args": args}  # fmt: skip


TRACE = [
    event("user_annotation", "step 3", 0, 1000),
    event("cpu_op", "_ParallelLinearBackward", 10, 100),
    event("cpu_op", "aten::mm", 20, 20),
    event("cuda_runtime", "cudaLaunchKernel", 25, 5, correlation=1),
    event("cpu_op", "aten::add_", 50, 20),
    event("cuda_runtime", "cudaLaunchKernel", 55, 5, correlation=2),
    event("cpu_op", "_Gated", 200, 50),
    event("cuda_driver", "cuLaunchKernelEx", 210, 5, correlation=3),
    event("user_annotation", "optimizer", 300, 50),
    event("cuda_runtime", "cudaLaunchKernel", 310, 5, correlation=4),
    event("kernel", "nvjet_tst_128x256", 1000, 100, correlation=1),
    event("kernel", "vectorized_elementwise_kernel", 1100, 50, correlation=2),
    event("kernel", "forward_kernel", 1140, 60, correlation=3),
    event("kernel", "multi_tensor_apply_kernel", 1300, 100, correlation=4),
]


def test_a_kernel_belongs_to_the_operators_around_its_launch():
    assert [each.family for each in work_of(TRACE)] == [
        "products", "weight gradient into fp32", "SwiGLU", "optimizer",
    ]  # fmt: skip


def test_kernels_that_overlap_are_busy_once():
    work = work_of(TRACE)
    assert busy_us(work) == 300
    summary = next(iter(rows_of(work)))
    assert summary["launches"] == 4
    assert summary["idle %"] == pytest.approx(25)


def test_a_variant_that_fails_has_the_reason_in_its_row():
    case = variants.VARIANTS[0].case(is_rehearsal=True)
    log = 'noise\nROW: {"error": "out of memory: CUDA out of memory"}\n'
    row = variants.row_of(Outcome(case, "exit status by rank: {0: 1}", 1.0, {}, log))
    assert row == {
        "variant": case.name, "took s": 1.0, "error": "out of memory: CUDA out of memory",
    }  # fmt: skip
    row = variants.row_of(Outcome(case, "time out: ranks [0]", 1.0, {}, ""))
    assert row["error"] == "time out: ranks [0]"


def test_the_planner_is_closer_to_the_runs_after_calibration():
    rows = [{"variant": name, "ms": ms} for name, ms in (("base", 700.0), ("1 x 8192", 750.0))]
    earlier = {"variant": "1B, 1 x 4096", "ms": 201.0, "micro batches": "2 x 1 x 4096"}
    runs = variants.measured_runs([*rows, {"variant": "fp8", "ms": 1.0}, earlier])
    assert [run.name for run in runs] == ["base", "1 x 8192"]
    found = list(variants.calibrated(runs, gpu_of_card("NVIDIA H100 80GB HBM3")))
    plans = [row for row in found if "plan of" in row]
    for row in plans:
        assert abs(row["after calibration ms"] - row["ms"]) < abs(row["planned ms"] - row["ms"])
    assert any("constant" in row for row in found)
