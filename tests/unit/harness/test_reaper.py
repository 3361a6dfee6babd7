"""A killed test run takes its processes and temporary files with it."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from megatron.core.foundation.process_identity import stat_of
from tests.harness.reaper import MARK

ROOT = Path(__file__).resolve().parents[3]

A_SHELL_IN_ITS_OWN_SESSION = """
import subprocess, time
from tests.harness import reaper
reaper.start()
command = "sleep 600 & echo $$ $!; wait"
subprocess.Popen(["sh", "-c", command], start_new_session=True)
time.sleep(600)
"""

A_FOLDER_THAT_STAYS = """
import signal, tempfile, time
from tests.harness import reaper
signal.signal(signal.SIGINT, signal.default_int_handler)  # ignored in the background of a shell
reaper.start()
print(tempfile.mkdtemp(), flush=True)
time.sleep(600)
"""

RANKS_IN_A_HANG = """
from tests.harness.distributed import run_distributed
from tests.harness.pool import POOL
from tests.distributed.harness.test_distributed_harness import hang_on_rank_one, rank_sum
run_distributed(rank_sum, 2, 1)
print(*POOL.worker_pids(), flush=True)
run_distributed(hang_on_rank_one, 2)
"""


def is_running(pid: int) -> bool:
    try:
        return not stat_of(pid).has_ended
    except OSError:
        return False


@pytest.mark.parametrize(
    ("code", "number"),
    [
        (A_SHELL_IN_ITS_OWN_SESSION, signal.SIGKILL),
        (A_SHELL_IN_ITS_OWN_SESSION, signal.SIGTERM),
        (RANKS_IN_A_HANG, signal.SIGKILL),
    ],
)
def test_a_killed_run_leaves_no_process(code, number):
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-c", code]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment) as run:
        assert run.stdout is not None
        children = [int(word) for word in run.stdout.readline().split()]
        assert len(children) == 2
        assert all(map(is_running, children))
        run.send_signal(number)
        assert run.wait(timeout=10) == -number
    deadline = time.monotonic() + 20
    while any(map(is_running, children)):
        assert time.monotonic() < deadline, children
        time.sleep(0.05)


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGINT])
def test_a_killed_run_leaves_no_temporary_file(number, tmp_path):
    environment = os.environ | {"PYTHONPATH": str(ROOT), "TMPDIR": str(tmp_path)}
    del environment[MARK]
    command = [sys.executable, "-c", A_FOLDER_THAT_STAYS]
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True, env=environment
    ) as run:
        assert run.stdout is not None
        assert Path(run.stdout.readline().strip()).is_relative_to(tmp_path)
        run.send_signal(number)
        run.wait(timeout=10)
    deadline = time.monotonic() + 20
    while list(tmp_path.iterdir()):
        assert time.monotonic() < deadline
        time.sleep(0.05)
