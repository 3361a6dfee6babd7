"""No process of a test run outlives it, nor a temporary file, also when the run itself is killed.

Ranks of the pool watch their parent themselves, but tests also start torchrun, shells and whole
commands, in sessions of their own, and a SIGKILL leaves nobody to stop them. So a small process,
started first, waits for the run to end and then kills what carries the run's mark: an environment
variable, which every descendant inherits. Then it may remove a folder that is TMPDIR to all of
them: torchrun and multiprocessing leave theirs, and so does what is killed.
"""

import os
import subprocess
import sys
import tempfile
import uuid

MARK = "LATTICE_TEST_RUNS"
"""Holds the marks of all runs around a process: a test may itself start a run."""

_WATCH = """
import os, shutil, signal, sys, time
mark, folder = sys.argv[1].encode(), sys.argv[2]
while os.read(0, 1):
    pass
time.sleep(0.5)  # what ends by itself, and cleans up, may
for _ in range(20):
    found = False
    for name in filter(str.isdigit, os.listdir("/proc")):
        try:
            with open(f"/proc/{name}/environ", "rb") as environ:
                marked = mark in environ.read()
            if marked and int(name) != os.getpid():
                os.kill(int(name), signal.SIGKILL)
                found = True
        except OSError:
            pass
    if not found:
        break
    time.sleep(0.1)
if folder:
    shutil.rmtree(folder, ignore_errors=True)
"""


def start(*, keeps_files: bool = False) -> None:
    """Mark this process' descendants and watch over them until it ends. Needs /proc.

    Args:
        keeps_files: temporary files stay where they are. Otherwise TMPDIR becomes a folder that is
            removed, and PYTEST_DEBUG_TEMPROOT what it was, for pytest's own folders.
    """
    if not os.path.isdir("/proc/self"):
        return
    mark, folder = uuid.uuid4().hex, ""
    if not keeps_files and MARK not in os.environ:  # a run inside another one has its folder
        # What a failed test wrote stays where pytest puts it.
        os.environ.setdefault("PYTEST_DEBUG_TEMPROOT", tempfile.gettempdir())
        folder = tempfile.mkdtemp(prefix="lattice-tests-")
        os.environ["TMPDIR"] = tempfile.tempdir = folder
    environment = {name: value for name, value in os.environ.items() if name != MARK}
    reading, writing = os.pipe()  # `writing` closes with this process, however it ends
    with open(os.devnull, "w") as nowhere:
        watcher = subprocess.Popen(
            [sys.executable, "-I", "-S", "-c", _WATCH, mark, folder],
            stdin=reading, stdout=nowhere, stderr=nowhere, env=environment, start_new_session=True,
        )  # fmt: skip
    os.close(reading)
    watcher.returncode = 0  # it outlives this process, which need not warn that it still runs
    os.environ[MARK] = f"{os.environ.get(MARK, '')} {mark}"
