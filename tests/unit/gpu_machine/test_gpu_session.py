"""The runner of a GPU machine's checks, with planted checks: what fails costs itself alone."""

import gzip
import json
import os
import signal
import subprocess
import sys
import time
import zipfile
from pathlib import Path

import pytest

from tools import gpu_session
from tools.gpu_session import PREPARE_S, STAGE_S, STAGES, Check, limits_s

ROOT = Path(__file__).resolve().parents[3]
GOOD = Check("good", """echo 'ROW: {"value": 1}'""", 20)


def start(checks, out, *words, seconds=60, stage="A"):
    """Start the runner with other checks in its stage A, or B, whose checks have turns."""
    program = (
        "import sys; from tools import gpu_session as s; from tools.gpu_session import Check;"
        f"s.STAGES['{stage}'] = {checks!r}; sys.exit(s.main(sys.argv[1:]))"
    )
    flags = [stage, "--seconds", str(seconds), "--out", str(out), "--rehearse", *words]
    return subprocess.Popen(
        [sys.executable, "-c", program, *flags], cwd=ROOT, stdout=subprocess.PIPE, text=True
    )


def run(checks, out, *words, seconds=60, stage="A"):
    """Run it; return its exit status, its table, and the results by check."""
    runner = start(checks, out, *words, seconds=seconds, stage=stage)
    text = runner.communicate(timeout=120)[0]
    return runner.returncode, text, results(out, stage)


def results(out, stage="A"):
    found = json.loads((out / f"{stage}.json").read_text())["checks"]
    return {each["check"]: each for each in found}


def is_alive(pid):
    """Return whether a process runs; a dead one that nobody has waited for does not."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(") ", 1)[1][0] != "Z"
    except OSError:
        return False


def test_a_crash_a_kill_and_a_lack_of_memory_cost_that_check_alone(tmp_path):
    python = f"{sys.executable} -c"
    memory = "import resource as r; r.setrlimit(r.RLIMIT_AS, (2**29, 2**29)); x = bytearray(2**30)"
    checks = [
        Check("crash", f"{python} 'import ctypes; ctypes.string_at(0)'", 20),
        Check("killed", "kill -9 $$", 20),
        Check("memory", f"{python} '{memory}'", 20),
        Check("error", "echo first; echo 'RuntimeError: CUDA error: lost'; exit 3", 20),
        GOOD,
    ]
    status, text, found = run(checks, tmp_path)
    assert status == 1
    assert {name: each["status"] for name, each in found.items()} == {
        "crash": -signal.SIGSEGV, "killed": -signal.SIGKILL, "memory": 1, "error": 3, "good": 0,
    }  # fmt: skip
    assert found["good"]["rows"] == [{"value": 1}]
    assert any("MemoryError" in line for line in found["memory"]["errors"])
    assert "RuntimeError: CUDA error: lost" in text
    with gzip.open(tmp_path / "A.log.gz", "rt") as logs:
        assert "RuntimeError: CUDA error: lost" in logs.read()


@pytest.mark.parametrize("how", ["", "setsid "])
def test_a_hang_costs_its_limit_and_its_children_are_ended(how, tmp_path):
    command = f"{how}sleep 1000 & echo $! > {tmp_path}/child; wait; sleep 1000"
    begin = time.monotonic()
    status, _, found = run([Check("hang", command, 0.2), GOOD], tmp_path)
    assert time.monotonic() - begin < 60
    assert (status, found["hang"]["status"], found["good"]["status"]) == (1, "time out", 0)
    assert not is_alive(int((tmp_path / "child").read_text()))


WAIT = "until [ -e $LATTICE_GPU_CHECK_TURN ]; do sleep 0.05; done"


def test_a_check_finds_the_time_of_its_end_in_a_file(tmp_path):
    begin = time.monotonic()
    command = f'{WAIT}; echo "ROW: $(cat $LATTICE_GPU_CHECK_TURN)"'
    _, _, found = run([Check("end", command, 20)], tmp_path)
    assert begin + 20 < found["end"]["rows"][0] <= time.monotonic() + 20 * 5


def test_a_check_starts_while_the_one_before_runs_and_its_limit_begins_with_its_turn(tmp_path):
    checks = [
        Check("first", f"until [ -e {tmp_path}/started ]; do sleep 0.05; done; sleep 2", 30),
        Check("second", f"touch {tmp_path}/started; {WAIT}; echo ROW: 1", 0.35),
        Check("third", f"{WAIT}; sleep 1000", 0.2),
        GOOD,
    ]
    status, text, found = run(checks, tmp_path, stage="B")
    assert status == 1
    assert [each["status"] for each in found.values()] == [0, 0, "time out", 0], text
    assert found["second"]["seconds"] < 1.75 < found["first"]["seconds"]


def test_a_check_that_waits_for_its_turn_is_ended_with_the_runner(tmp_path):
    checks = [
        Check("long", f"until [ -e {tmp_path}/child ]; do sleep 0.05; done; sleep 1000", 500),
        Check("next", f"echo $$ > {tmp_path}/child; {WAIT}", 500),
    ]
    runner = start(checks, tmp_path, seconds=600, stage="B")
    while not (tmp_path / "child").exists() or not (tmp_path / "child").read_text():
        time.sleep(0.05)
    runner.send_signal(signal.SIGTERM)
    runner.communicate(timeout=30)
    assert not is_alive(int((tmp_path / "child").read_text()))


def test_checks_of_a_group_run_at_the_same_time_and_others_do_not(tmp_path):
    meets = f"touch {tmp_path}/$0; until [ -e {tmp_path}/$1 ]; do sleep 0.05; done"
    checks = [
        Check("one", f"bash -c '{meets}' a b", 30, "group"),
        Check("two", f"bash -c '{meets}' b a", 30, "group"),
        Check("after", f"test -e {tmp_path}/a -a -e {tmp_path}/b", 30),
    ]
    status, text, _ = run(checks, tmp_path)
    assert status == 0, text


def test_without_time_a_check_has_a_row_that_says_so_and_the_stage_fails(tmp_path):
    status, text, found = run([GOOD, Check("long", "true", 30)], tmp_path, seconds=0)
    assert status == 1
    assert [found[name]["status"] for name in ("good", "long")] == ["no time", "no time"]
    assert "no time" in text


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
def test_the_results_are_whole_when_the_runner_is_killed(number, tmp_path):
    checks = [GOOD, Check("long", f"echo $$ > {tmp_path}/child; exec sleep 1000", 500)]
    runner = start(checks, tmp_path, seconds=600)
    while not (tmp_path / "child").exists() or not (tmp_path / "child").read_text():
        time.sleep(0.05)
    runner.send_signal(number)
    text = runner.communicate(timeout=30)[0]
    found = results(tmp_path)
    assert found["good"] == found["good"] | {"status": 0, "rows": [{"value": 1}]}
    with gzip.open(tmp_path / "A.log.gz", "rt") as logs:
        assert "ROW" in logs.read()
    if number == signal.SIGTERM:
        assert "signal 15" in found["long"]["status"]
        assert "good" in text
    child = int((tmp_path / "child").read_text())
    end = time.monotonic() + 20
    while is_alive(child) and time.monotonic() < end:
        time.sleep(0.05)
    assert not is_alive(child)


@pytest.mark.parametrize("stage", STAGES)
def test_a_stage_fits_its_time_even_if_every_check_takes_its_limit(stage):
    assert limits_s(STAGES[stage]) + PREPARE_S[stage] <= STAGE_S


def test_wheels_are_found_by_the_checks_and_a_peer_of_our_name_is_apart(tmp_path):
    for name, file in (("plain", "plain/__init__.py"), ("peer", "megatron/core/__init__.py")):
        with zipfile.ZipFile(tmp_path / f"{name}-1-py3-none-any.whl", "w") as wheel:
            wheel.writestr(file, "")
    found = gpu_session.unpack_wheels(tmp_path, tmp_path / "unpacked")
    assert (Path(found["PYTHONPATH"]) / "plain/__init__.py").exists()
    assert not (Path(found["PYTHONPATH"]) / "megatron").exists()
    assert (Path(found["LATTICE_PEER_SITE"]) / "megatron/core/__init__.py").exists()
    assert gpu_session.unpack_wheels(tmp_path / "absent", tmp_path) == {}


def test_a_rehearsal_computes_on_the_cpu_and_a_real_stage_does_not(tmp_path, monkeypatch):
    monkeypatch.setenv("LATTICE_DEVICE", "cpu")
    for rehearse in (True, False):
        found = gpu_session.environment(tmp_path, tmp_path, {}, rehearse=rehearse)
        assert found.get("LATTICE_DEVICE") == ("cpu" if rehearse else None)
        assert found["PATH"].split(os.pathsep)[0] == str(Path(sys.executable).parent)
