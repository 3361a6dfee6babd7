"""The small models of a GPU machine's checks: flags are accepted, losses are today's."""

import json
import math
import os
import subprocess
import sys
import time
import warnings
from pathlib import Path

import pytest

from benchmarks.gpu import first_step, forks, layouts, paths
from benchmarks.gpu.forks import FOLDER, Case, Outcome, Run, run_cases
from benchmarks.gpu.small_models import STEPS, TOLERANCES, Claim, expected_losses, print_outcome
from megatron_lattice.planner.search_command import run_of_words
from tools import gpu_session

ROOT = Path(__file__).resolve().parents[3]
CASE = Case(name="case", runs=(Run(words=("--flag",)),))


def test_the_stored_losses_are_those_of_the_code_today():
    now, stored = paths.losses_now(), expected_losses()
    assert now.keys() == stored.keys()
    for name, loss in now.items():
        assert loss == pytest.approx(stored[name], rel=2e-6), name


@pytest.mark.parametrize("name", layouts.LAYOUTS)
def test_the_flags_of_a_layout_are_accepted(name):
    (claim,) = [each for each in layouts.claims("nccl") if each.case.name == name]
    assert claim.expected in expected_losses()
    for run in claim.case.runs:
        text = " ".join(run.words).replace(f"--load {FOLDER}/saved", "").replace(FOLDER, "runs")
        run_of_words(text.split(), run.num_ranks)


def row_of(outcome, capsys, **about):
    losses = {"case": 5.0}
    held = print_outcome(Claim(case=outcome.case, expected="case", **about), outcome, losses)
    (row,) = [x for x in capsys.readouterr().out.splitlines() if x.startswith("ROW: ")]
    return held, json.loads(row[5:])


def test_a_loss_holds_within_its_tolerance(capsys):
    for dtype, allowed in TOLERANCES.items():
        for factor, wanted in ((0.9, True), (1.1, False)):
            loss = 5.0 * (1 + factor * allowed)
            outcome = Outcome(CASE, "", 1.0, {STEPS: loss}, "")
            held, row = row_of(outcome, capsys, dtype=dtype)
            assert held == row["ok"] == wanted


def test_a_run_without_a_last_loss_or_with_a_problem_does_not_hold(capsys):
    held, row = row_of(Outcome(CASE, "", 1.0, {1: 5.0}, ""), capsys)
    assert not held and "no loss of step 3" in row["problem"]
    log = "rank 1: ConfigError: found\nbut"
    held, row = row_of(Outcome(CASE, "exit status by rank: {1: 3}", 1.0, {STEPS: 5.0}, log), capsys)
    assert not held and row["errors"] == ["rank 1: ConfigError: found"]
    held, row = row_of(Outcome(CASE, "", 1.0, {STEPS: float("nan")}, ""), capsys)
    assert not held


def planted(monkeypatch, tmp_path, behaviours, **how):
    """Run cases whose ranks do what `behaviours` has for their first word; return outcomes."""
    monkeypatch.setattr(forks.pretrain_gpt, "main", lambda: behaviours[sys.argv[1]]())
    outcomes = []
    cases = [Case(name=name, runs=(Run(words=(name,), num_ranks=2),), **how.pop(name, {}))
             for name in behaviours]  # fmt: skip
    run_cases(cases, tmp_path / "logs", ranks_at_once=4, limit_s=how.pop("limit_s", 20),
              whole_limit_s=how.pop("whole_limit_s", 100), on_end=outcomes.append)  # fmt: skip
    return {outcome.case.name: outcome for outcome in outcomes}


def raises():
    raise RuntimeError("planted")


def test_a_rank_that_fails_or_is_killed_costs_its_case_alone(monkeypatch, tmp_path):
    found = planted(monkeypatch, tmp_path, {
        "fails": lambda: raises() if os.environ["RANK"] == "1" else None,
        "is killed": lambda: os.kill(os.getpid(), 9),
        "works": lambda: print(f" iteration 3/ 3 | lm loss: {os.environ['WORLD_SIZE']}.5"),
    })  # fmt: skip
    assert found["fails"].problem == "exit status by rank: {1: 1}"
    assert "RuntimeError: planted" in found["fails"].log
    assert found["is killed"].problem == "exit status by rank: {0: -9, 1: -9}"
    assert (found["works"].problem, found["works"].losses) == ("", {3: 2.5})


def test_a_case_that_hangs_costs_its_limit_and_others_wait_no_longer(monkeypatch, tmp_path):
    behaviours = {"hangs": lambda: time.sleep(1000), "works": lambda: None}
    found = planted(monkeypatch, tmp_path, behaviours, limit_s=2)
    assert found["hangs"].problem == "time out: ranks [0, 1] still ran in run 1"
    assert 2 <= found["hangs"].seconds < 15
    assert found["works"].problem == ""


def test_a_case_that_cannot_begin_in_time_is_reported(monkeypatch, tmp_path):
    found = planted(monkeypatch, tmp_path, {"late": lambda: None}, whole_limit_s=1)
    assert found["late"].problem == "no time"


@pytest.mark.parametrize(
    ("others_do", "problem"),
    [
        (lambda: sys.exit("rank 1 is gone"), ""),
        (lambda: sys.exit("a peer is gone"), "no rank named rank 1, which was killed"),
        (lambda: None, "ranks ended with [0] although rank 1 was killed"),
    ],
)
def test_a_job_must_end_and_name_the_rank_that_was_killed(
    others_do, problem, monkeypatch, tmp_path
):
    def trains():
        own = tmp_path / os.environ["RANK"]
        own.write_text(str(os.getpid()))
        if os.environ["RANK"] == "1":
            print(" iteration 1/ 3 | lm loss: 5.0")
            time.sleep(1000)
        killed = tmp_path / "1"
        while not killed.exists() or _runs(killed.read_text()):
            time.sleep(0.05)
        try:
            others_do()
        except SystemExit as stop:
            print(stop.code)
            raise

    found = planted(monkeypatch, tmp_path, {"loses": trains}, loses={"loses_rank": True})
    assert found["loses"].problem == problem


def _runs(pid):
    stat = Path(f"/proc/{pid or 'self'}/stat")
    return stat.exists() and stat.read_text().rsplit(") ", 1)[1][0] != "Z"


def test_ranks_are_processes_of_their_own_where_forks_cannot_compute(monkeypatch, tmp_path):
    monkeypatch.setattr(forks, "forks_can_compute", lambda: False)
    (claim,) = paths.claims(["recomputation"], on_cpu=True)
    outcomes = []
    run_cases([claim.case], tmp_path / "logs", ranks_at_once=1, limit_s=120, whole_limit_s=120,
              on_end=outcomes.append)  # fmt: skip
    assert outcomes[0].problem == "", outcomes[0].log
    assert STEPS in outcomes[0].losses


@pytest.mark.parametrize("stage", ["A", "D"])
def test_the_stage_is_rehearsed(stage, tmp_path):
    flags = ["--seconds", "900", "--out", str(tmp_path), "--rehearse"]
    names = [each.name for each in gpu_session.STAGES[stage] if each.name != "paths"]  # see above
    chosen = [word for name in names for word in ("--only", name)]
    command = [sys.executable, "tools/gpu_session.py", stage, *flags, *chosen]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=900)
    assert done.returncode == 0, done.stdout + done.stderr
    found = json.loads((tmp_path / f"{stage}.json").read_text())
    assert found["rehearsal"]
    assert {each["check"] for each in found["checks"]} == set(names)


def test_host_waits_are_counted_by_the_line_of_this_project(monkeypatch):
    monkeypatch.setattr(warnings, "showwarning", warnings.showwarning)
    with warnings.catch_warnings():
        places = first_step.note_waits()
        for text in ("called a synchronizing CUDA operation", "another matter"):
            for _ in range(2):
                warnings.warn(text, stacklevel=1)
    line = test_host_waits_are_counted_by_the_line_of_this_project.__code__.co_firstlineno + 6
    assert places == {f"tests/unit/gpu_machine/test_small_models.py:{line}": 2}


@pytest.mark.parametrize(
    ("losses", "is_good"),
    [([3.0, 2.9, 2.8, 2.7, 2.6, 2.5], True), ([3.0] * 6, False), ([3.0, 2.0], False),
     ([3.0, 2.9, 2.8, 2.7, 2.6, float("nan")], False)],
)  # fmt: skip
def test_a_first_step_is_right_if_its_losses_are_finite_and_fall(losses, is_good):
    outcome = Outcome(CASE, "", 1.0, dict(enumerate(losses, 1)), 'host waits: [["a.py:1", 4]]')
    row = first_step.row_of(outcome, "ours")
    assert row["ok"] == is_good
    assert row["host waits"] == {"a.py:1": 4}
    near = [loss * 1.001 for loss in losses]
    is_whole = len(losses) == 6 and all(map(math.isfinite, losses))
    assert (first_step.difference(losses, near) <= first_step.TOLERANCE) == is_whole


def test_where_nccl_refuses_the_first_layout_the_others_run_by_gloo(monkeypatch):
    ran = []

    def run_claims(claims, **_):
        ran.extend((claim.about["backend"], claim.case.name) for claim in claims)
        return claims[0].about["backend"] == "gloo"

    monkeypatch.delenv("LATTICE_DEVICE")
    monkeypatch.setattr(layouts, "run_claims", run_claims)
    assert layouts.main([]) == 1
    assert ran[0] == ("nccl", "TP 2")
    assert ran[1:] == [("gloo", name) for name in layouts.LAYOUTS]
