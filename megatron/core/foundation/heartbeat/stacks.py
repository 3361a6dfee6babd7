"""Where the threads of other processes are: in Python, by `faulthandler`, and in the kernel."""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

STACK_S, POLL_S = 2.0, 0.005
"""How long to wait for stacks on a crowded machine, and how often to look."""
_LAST_LINES = (b" in <module>\n", b" in _run_module_as_main\n", b"  ...\n")


@dataclass
class StackRequest:
    """A process whose Python stacks are asked for.

    Args:
        file: descriptor, here, of the file to which `faulthandler` appends them there.
        is_stopped: it is continued for the moment that it takes, and stopped again.
    """

    process: int
    file: int
    is_stopped: bool
    _begin: int = field(init=False)

    def __post_init__(self) -> None:
        self._begin = os.fstat(self.file).st_size

    def send(self, number: int) -> None:
        """Ask the main thread, whose stack counts: any thread may take a signal to the process."""
        try:
            ctypes.CDLL(None).tgkill(self.process, self.process, number)
        except AttributeError:  # the C library is older than the call
            self._kill(number)
        if self.is_stopped:
            self._kill(signal.SIGCONT)

    def is_answered(self) -> bool:
        """Return whether all has come: the thread that was asked writes its own stack last."""
        text = self._read()
        return b"Current thread" in text and text.endswith(_LAST_LINES)

    def take(self) -> str:
        """Return what has come."""
        if self.is_stopped:
            self._kill(signal.SIGSTOP)
        return self._read().decode(errors="replace").strip()

    def _read(self) -> bytes:
        return os.pread(self.file, os.fstat(self.file).st_size - self._begin, self._begin)

    def _kill(self, number: int) -> None:
        with contextlib.suppress(OSError):
            os.kill(self.process, number)


def python_stacks(requests: Sequence[StackRequest], number: int) -> list[str]:
    """Return the Python stacks of all threads of each process; empty where none came.

    Args:
        number: of the signal that `faulthandler` answers there.
    """
    for request in requests:
        request.send(number)
    found: dict[int, str] = {}
    deadline = time.monotonic() + STACK_S
    while len(found) < len(requests) and time.monotonic() < deadline:
        time.sleep(POLL_S)
        for request in requests:
            if request.process not in found and request.is_answered():
                found[request.process] = request.take()
    return [found.get(request.process) or request.take() for request in requests]


def kernel_state(process: int) -> dict[str, str]:
    """Return where each thread of a process is in the kernel, as far as it tells."""
    found = {}
    with contextlib.suppress(OSError):
        for thread in sorted(Path(f"/proc/{process}/task").iterdir(), key=lambda p: int(p.name)):
            with contextlib.suppress(OSError):
                state = (thread / "stat").read_text(errors="replace").rpartition(")")[2].split()[0]
                where = (thread / "wchan").read_text().strip()
                found[thread.name] = f"{state} {where}"
    return found
