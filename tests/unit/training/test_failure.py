"""A failed run says one final line, leaves failure.json, and exits with the code of its class."""

import ctypes
import errno
import json
import os
import re
import resource
import signal
import subprocess
import sys
import time

import pytest
import torch
import torch.distributed as dist
from torch.distributed.elastic.multiprocessing.errors import ProcessFailure

from megatron.core.foundation.errors import (
    CheckpointError,
    CollectiveMismatchError,
    ConfigError,
    DataError,
    HardwareFaultError,
    MissingExtraError,
    NumericsError,
    PeerLostError,
    ReplicaMismatchError,
    SpikeError,
    TopologyError,
    raise_together,
)
from megatron.core.foundation.failure_file import UNFINISHED
from megatron.core.foundation.process_identity import ProcessIdentity, stat_of
from megatron.core.pipeline_parallel.step_handshake import lost_neighbour
from megatron.resilience import failure, signals
from megatron.resilience.failure import (
    LauncherLostError,
    classify,
    failures_reported,
    set_earlier_failure_aside,
)
from megatron.resilience.process_watch import LocalPeers, Peer, ProcessWatch
from megatron.resilience.status import RunStatus
from megatron.training.launch import rank_info
from megatron.training.launch.rank_info import RankInfo
from tests.harness.save_lock_holder import held_by_another_run
from tests.harness.unread_stdout import unread_stdout

FATAL = re.compile(
    r"^FATAL\[(?P<kind>\w+)\] (iter=(?P<iter>\d+) )?rank=(?P<rank>\d+) host=\S+"
    r" where=(?P<where>.+?)( last_good_ckpt=(?P<last>\w+))? action=(?P<action>.+)$",
    re.MULTILINE,
)


def fail(error: BaseException, status: RunStatus, store=None) -> int:
    """Run the reporting around a body that raises; return the exit code."""
    status.store = store
    with pytest.raises(SystemExit) as caught, failures_reported(status):
        raise error
    return caught.value.code


@pytest.mark.parametrize(
    ("error", "kind", "code"),
    [
        (ConfigError("x"), "CONFIG", 10),
        (DataError("x"), "DATA", 11),
        (CheckpointError("x"), "CHECKPOINT", 12),
        (TopologyError("x"), "TOPOLOGY", 13),
        (PeerLostError("x"), "PEER_LOST", 17),
        (CollectiveMismatchError("x"), "COLLECTIVE_MISMATCH", 22),
        (LauncherLostError("x"), "LAUNCHER_LOST", 18),
        (ReplicaMismatchError("x"), "REPLICA_MISMATCH", 19),
        (NumericsError("x"), "NONFINITE", 14),
        (HardwareFaultError("x"), "HARDWARE", 23),
        (SpikeError("x"), "SPIKE", 24),
        (MissingExtraError("x"), "MISSING_LIBRARY", 15),
        (MemoryError(), "OOM", 16),
        (torch.OutOfMemoryError("CUDA out of memory"), "OOM", 16),
        (RuntimeError("[enforce fail] DefaultCPUAllocator: can't allocate memory"), "OOM", 16),
        (RuntimeError("[pair.cc] Connection closed by peer [127.0.0.1]:1"), "PEER_LOST", 17),
        (RuntimeError("std::bad_alloc"), "OOM", 16),
        (RuntimeError("can't start new thread"), "LIMIT", 26),
        (RuntimeError("Resource temporarily unavailable"), "LIMIT", 26),
        (BlockingIOError(errno.EAGAIN, "Resource temporarily unavailable"), "LIMIT", 26),
        (OSError(errno.EMFILE, "Too many open files"), "LIMIT", 26),
        (
            lost_neighbour(0, "the activations", "pipeline rank 1", RuntimeError("reset")),
            "PEER_LOST",
            17,
        ),
        (KeyboardInterrupt(), "INTERRUPTED", 130),
        (ZeroDivisionError("x"), "CRASH", 1),
    ],
)
def test_every_failure_has_a_class_and_an_exit_code(error, kind, code, capsys):
    assert classify(error) == (kind, code)
    assert fail(error, RunStatus(rank=3, iteration=7, activity="training", has_begun=True)) == code
    lines = capsys.readouterr().err.strip().splitlines()
    found = FATAL.match(lines[-1])
    assert found is not None
    assert (found["kind"], found["iter"], found["rank"]) == (kind, "7", "3")
    assert (found["where"], found["last"]) == ("training", "none")
    assert found["action"]


@pytest.mark.parametrize(
    ("limit", "soft", "error", "told"),
    [
        ("RLIMIT_AS", 8 << 40, RuntimeError("can't start new thread"), "(ulimit -v)"),
        ("RLIMIT_AS", 8 << 40, MemoryError(), "the address space, now 8,388,608 MiB (ulimit -v)"),
        ("RLIMIT_NPROC", 9000, RuntimeError("can't start new thread"), "9000 (ulimit -u)"),
        ("RLIMIT_NOFILE", 900, OSError(errno.EMFILE, "x"), "open files, now 900 (ulimit -n)"),
    ],
)
def test_a_refused_thread_or_file_is_answered_with_the_limit_that_refused_it(
    limit, soft, error, told, capsys
):
    number = getattr(resource, limit)
    before = resource.getrlimit(number)
    resource.setrlimit(number, (soft, before[1]))
    try:
        fail(error, RunStatus(has_begun=True))
    finally:
        resource.setrlimit(number, before)
    action = FATAL.search(capsys.readouterr().err)["action"]
    assert action.startswith("raise the limit of")
    assert told in action


@pytest.mark.parametrize("gap_s", [0.0, 0.01])
def test_a_second_interrupt_does_not_break_into_the_report_of_the_first(gap_s):
    """The body cleans up for a while, as loader workers are joined; then the report is written."""
    code = """
import contextlib, sys, time
from megatron.resilience.failure import failures_reported
from megatron.resilience.status import RunStatus
with failures_reported(RunStatus(activity="training")):
    try:
        print("ready", flush=True)
        time.sleep(30)
    finally:
        time.sleep(0.3)
"""
    process = subprocess.Popen(
        [sys.executable, "-c", code], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.default_int_handler),
    )  # fmt: skip
    assert process.stdout.readline() == "ready\n"
    for _ in range(3):
        process.send_signal(signal.SIGINT)
        time.sleep(gap_s)
    _, err = process.communicate(timeout=30)
    assert process.returncode == 130
    assert FATAL.search(err)["kind"] == "INTERRUPTED"
    assert "Traceback" not in err


def test_an_interrupt_after_the_patience_of_a_run_that_does_not_end_is_obeyed(monkeypatch):
    ended = []
    monkeypatch.setattr(signals, "end_by", ended.append)
    monkeypatch.setattr(signals, "PATIENCE_S", 0.2)
    with pytest.raises(KeyboardInterrupt), signals.interrupted_once():
        signal.raise_signal(signal.SIGINT)
    former = signal.getsignal(signal.SIGINT)
    signal.signal(signal.SIGINT, signals.interrupt_once)
    try:
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(signal.SIGINT)
        signal.raise_signal(signal.SIGINT)
        assert ended == []
        time.sleep(0.3)
        signal.raise_signal(signal.SIGINT)
        assert ended == [signal.SIGINT]
    finally:
        signal.signal(signal.SIGINT, former)


def test_a_users_error_has_no_traceback(capsys):
    fail(DataError("the file is gone.", fix="bring it back"), RunStatus())
    err = capsys.readouterr().err
    assert "Traceback" not in err
    assert "the file is gone." in err
    assert FATAL.search(err)["action"] == "bring it back"


def test_an_unexpected_error_keeps_its_traceback(capsys):
    fail(ZeroDivisionError("deep inside"), RunStatus())
    assert "Traceback" in capsys.readouterr().err


def joint(*problems) -> ConfigError:
    """Return the error that reports several problems together."""
    with pytest.raises(ConfigError) as caught:
        raise_together(problems, summary="a test")
    return caught.value


def test_a_joint_error_has_the_class_of_its_parts_and_the_fix_of_a_single_one(capsys):
    assert classify(joint(DataError("a"), DataError("b")))[0] == "DATA"
    assert classify(joint(DataError("a"), ConfigError("b")))[0] == "CONFIG"
    fail(joint(DataError("a", fix="bring a")), RunStatus())
    assert FATAL.search(capsys.readouterr().err)["action"] == "bring a"


def test_the_same_facts_are_in_failure_json(tmp_path, capsys):
    status = RunStatus(
        rank=1,
        has_begun=True,
        iteration=12,
        activity="saving a checkpoint",
        last_good_checkpoint=10,
        save_directory=str(tmp_path),
    )
    code = fail(CheckpointError("no space", flags=["--save"], fix="free 3 GiB"), status)
    record = json.loads((tmp_path / "failure.json").read_text())
    line = FATAL.search(capsys.readouterr().err)
    assert (record["class"], record["exit_code"]) == (line["kind"], code)
    assert (record["iteration"], record["rank"]) == (12, 1)
    assert str(record["last_good_ckpt"]) == line["last"] == "10"
    assert record["where"] == line["where"] == "saving a checkpoint"
    assert record["action"] == line["action"] == "free 3 GiB"
    assert record["message"] == "no space"
    assert {path.name for path in tmp_path.iterdir()} == {
        "failure.json",
        "failures.jsonl",
        ".lease",
    }


def test_a_save_directory_that_cannot_be_written_does_not_hide_the_line(tmp_path, capsys):
    (tmp_path / "file").touch()
    fail(ConfigError("x"), RunStatus(save_directory=str(tmp_path / "file" / "below")))
    assert FATAL.search(capsys.readouterr().err)


def test_torchrun_is_told_what_to_show_as_the_root_cause(tmp_path, monkeypatch, capsys):
    """Also by a rank that fails because of the one that reports."""
    monkeypatch.setattr(os, "getppid", lambda: 4711)  # also where these tests run as an orphan
    store = dist.HashStore()
    shown = []
    for rank, error in enumerate([DataError("broken file"), RuntimeError("Broken pipe")]):
        monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", str(tmp_path / "error.json"))
        fail(error, RunStatus(rank=rank), store)
        found = ProcessFailure(rank, 1, 11, str(tmp_path / "error.json"))
        shown.append(found.message["extraInfo"]["py_callstack"])
        assert abs(found.timestamp - time.time()) < 60
    assert all("broken file" in text and "FATAL[DATA]" in text for text in shown)
    assert "Broken pipe" not in shown[1] + capsys.readouterr().err


def test_a_run_whose_output_nobody_reads_lost_no_rank(capsys):
    with (
        unread_stdout(),
        pytest.raises(SystemExit, match="141"),
        failures_reported(RunStatus()),
    ):
        print("iteration 1", flush=True)
    said = capsys.readouterr().err
    assert "FATAL[OUTPUT_CLOSED]" in said
    assert "Traceback" not in said


def test_a_mistake_in_the_settings_is_told_without_iteration_and_checkpoint(capsys):
    fail(ConfigError("unknown flag", fix="spell it"), RunStatus())
    line = capsys.readouterr().err.strip().splitlines()[-1]
    assert re.fullmatch(
        r"FATAL\[CONFIG\] rank=0 host=\S+ where=reading the settings action=spell it", line
    )


def test_a_run_that_was_refused_leaves_nothing_in_the_directory_of_another(tmp_path, capsys):
    with held_by_another_run(tmp_path):
        fail(ConfigError("x"), RunStatus(save_directory=str(tmp_path)))
        assert FATAL.search(capsys.readouterr().err)
        assert not (tmp_path / "failure.json").exists()
    fail(ConfigError("x"), RunStatus(save_directory=str(tmp_path)))
    assert (tmp_path / "failure.json").exists()


def test_the_record_of_an_earlier_run_is_set_aside(tmp_path):
    fail(ConfigError("x"), RunStatus(save_directory=str(tmp_path), attempt=3))
    (tmp_path / f"{UNFINISHED}abc").touch()
    set_earlier_failure_aside(str(tmp_path))
    assert not (tmp_path / "failure.json").exists()
    assert not list(tmp_path.glob("*abc"))
    assert json.loads((tmp_path / "failure.previous.json").read_text())["attempt"] == 3
    set_earlier_failure_aside(str(tmp_path))


class SilentStore:
    """A store at the end of a dead link: torch waits for its answer without end."""

    def add(self, key: str, amount: int) -> int:
        time.sleep(60)
        return amount


@pytest.mark.parametrize(("local_rank", "reports"), [(0, True), (1, False)])
def test_a_store_that_does_not_answer_keeps_no_rank_from_ending(
    local_rank, reports, capsys, monkeypatch
):
    monkeypatch.setattr(failure, "WAIT_S", 0.2)
    began = time.monotonic()
    fail(RuntimeError("Broken pipe"), RunStatus(local_rank=local_rank), SilentStore())
    assert time.monotonic() - began < 10
    assert bool(FATAL.search(capsys.readouterr().err)) is reports


def test_a_rank_waits_for_nobody_whom_its_launcher_does_not_count():
    info = RankInfo(rank=1, local_rank=1, world_size=2, is_launched=True)
    assert LocalPeers.meet(store=None, info=info).peers == []


def test_a_lost_rank_is_named_where_it_can_be(capsys):
    sleeper = subprocess.Popen(["sleep", "60"])
    peer = Peer(5, identity_of(sleeper.pid))
    status = RunStatus(has_begun=True, peers=LocalPeers([peer]))
    os.kill(sleeper.pid, signal.SIGSTOP)
    wait_for(lambda: peer.look() == "T")
    fail(PeerLostError("no answer"), status)
    stopped = f"rank 5 (process {sleeper.pid}) is stopped (SIGSTOP, or a debugger)"
    assert stopped in capsys.readouterr().err
    assert not peer.was_lost()
    sleeper.kill()
    wait_for(peer.was_lost)
    status.has_reported = False
    fail(RuntimeError("Connection closed by peer"), status)
    killed = f"rank 5 (process {sleeper.pid}) was killed by signal 9, in most cases for lack of"
    assert killed in capsys.readouterr().err
    sleeper.wait()
    assert "killed by signal 9" in peer.describe(), "once seen, it is remembered"
    assert "ended without a report" in Peer(5, peer.identity).describe()


def identity_of(process: int) -> ProcessIdentity:
    own = ProcessIdentity.own()
    return own._replace(number=process, start=stat_of(process).start)


def wait_for(is_so) -> None:
    deadline = time.monotonic() + 20
    while not is_so():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def rank_that_waits(launcher: int, told: int) -> int:
    """Fork a rank that never comes to its next instruction, as in a collective; return its id."""
    rank = os.fork()
    if rank == 0:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        watch = ProcessWatch(launcher, lambda: os._exit(18), lambda: os.write(told, b"1"))
        watch.answer_term()
        signal.signal(signal.SIGALRM, signal.SIG_DFL)
        signal.alarm(60)
        os.write(told, b"0")
        # Locked twice: unlike a sleep, that does not return at a signal.
        mutex = ctypes.create_string_buffer(128)
        ctypes.CDLL(None).pthread_mutex_lock(mutex)
        ctypes.CDLL(None).pthread_mutex_lock(mutex)
        os._exit(0)
    return rank


def test_peers_of_new_groups_take_the_place_of_the_former_ones():
    def num_open() -> int:
        return len(os.listdir("/proc/self/fd"))

    others = [subprocess.Popen(["sleep", "60"]) for _ in range(2)]
    before = num_open()
    watch = ProcessWatch(None, lambda: None, lambda: None)
    try:
        for _ in range(3):
            watch.follow([Peer(rank, identity_of(p.pid)) for rank, p in enumerate(others)])
            wait_for(lambda: num_open() == before + 2 + 2)  # two sockets, two processes
            watch.follow([Peer(2, identity_of(others[0].pid))])
            wait_for(lambda: num_open() == before + 2 + 1)
    finally:
        watch.close()
        for other in others:
            other.kill()
            other.wait()
    assert num_open() == before


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
def test_a_rank_that_waits_hears_of_the_end_of_its_launcher_and_of_sigterm(number):
    launcher = subprocess.Popen(["sleep", "60"])
    reading, told = os.pipe()
    rank = rank_that_waits(launcher.pid, told)
    os.close(told)  # so that nobody waits for a rank that ended without a word
    assert os.read(reading, 1) == b"0"
    began = time.monotonic()
    if number == signal.SIGKILL:
        launcher.kill()
    else:
        os.kill(rank, signal.SIGTERM)
    code = os.waitstatus_to_exitcode(os.waitpid(rank, 0)[1])
    assert time.monotonic() - began < 20
    if number == signal.SIGKILL:
        assert code == 18
    else:
        assert (code, os.read(reading, 1)) == (-signal.SIGTERM, b"1")
    launcher.kill()
    launcher.wait()


@pytest.mark.parametrize("is_python", [False, True])
def test_an_orphan_has_lost_its_launcher_unless_process_1_may_be_the_launcher(
    is_python, monkeypatch
):
    monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", "/nowhere/error.json")
    monkeypatch.setattr(rank_info.os, "getppid", lambda: 1)
    monkeypatch.setattr(rank_info, "_is_python", lambda process: is_python)
    assert rank_info.has_lost_its_launcher() is not is_python
    assert rank_info.launcher_process() == (1 if is_python else None)


def test_a_rank_whose_launcher_ended_while_it_imported_ends_too(monkeypatch, capsys):
    monkeypatch.setattr(rank_info, "has_lost_its_launcher", lambda: True)
    with pytest.raises(SystemExit) as ended, failures_reported(RunStatus()):
        raise AssertionError("training begins without a launcher")
    assert ended.value.code == 18
    assert "FATAL[LAUNCHER_LOST]" in capsys.readouterr().err


def test_the_launcher_is_found_past_a_shell(tmp_path):
    code = "from megatron.training.launch.rank_info import launcher_process as f; print(f())"
    found = [
        subprocess.run(
            ["sh", "-c", f"'{sys.executable}' -c '{code}'; true"],
            env={**os.environ, **variables},
            capture_output=True,
            text=True,
            check=True,
        ).stdout.strip()
        for variables in ({"TORCHELASTIC_ERROR_FILE": str(tmp_path / "error.json")}, {})
    ]
    assert found == [str(os.getpid()), "None"], "by hand, nobody is watched"


def test_of_several_ranks_one_reports(capsys):
    store = dist.HashStore()
    fail(DataError("broken"), RunStatus(rank=2), store)
    fail(RuntimeError("Connection closed by peer"), RunStatus(rank=0), store)
    assert len(FATAL.findall(capsys.readouterr().err)) == 1


def test_a_resumable_run_is_told_how_to_go_on(capsys):
    status = RunStatus(has_begun=True, last_good_checkpoint=5, save_directory="/nowhere/x")
    fail(RuntimeError("Connection closed by peer"), status)
    assert "resume with --load /nowhere/x" in FATAL.search(capsys.readouterr().err)["action"]


def test_leaving_on_purpose_is_no_failure(capsys):
    with pytest.raises(SystemExit) as caught, failures_reported(RunStatus()):
        raise SystemExit(0)
    assert caught.value.code == 0
    assert capsys.readouterr().err == ""
