"""Helper processes of a rank: their end and their signals; limits of the system.

No torch import, because workers of preprocessing use it, too.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import faulthandler
import os
import resource
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

STOP_SIGNALS = frozenset(
    {signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2}
)
"""Signals that launchers, schedulers and terminals send to a whole process group."""


def die_with_parent(parent: int) -> None:
    """End this process when its parent ends: a child that waits for work would never end.

    Args:
        parent: process id of the process that forked this one.
    """
    if sys.platform == "linux":
        set_death_signal = 1  # PR_SET_PDEATHSIG
        ctypes.CDLL(None).prctl(set_death_signal, signal.SIGKILL)
        if os.getppid() != parent:
            os._exit(1)


@contextlib.contextmanager
def stop_signals_blocked() -> Iterator[None]:
    """Block `STOP_SIGNALS` in this thread, and in a child forked here, until the block ends.

    In a child they stay blocked: it calls `ignore_stop_signals_except_from` next.
    """
    if not hasattr(signal, "pthread_sigmask"):
        yield
        return
    before = signal.pthread_sigmask(signal.SIG_BLOCK, STOP_SIGNALS)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def ignore_stop_signals_except_from(parent: int) -> None:
    """Ignore `STOP_SIGNALS`, which are meant for the run, except for SIGTERM from the parent.

    A run that receives a stop signal finishes its step, and needs its helpers for it. SIGTERM
    cannot simply be ignored, because the parent ends a helper with it.

    Args:
        parent: process id of the process that may end this one.
    """
    for number in STOP_SIGNALS - {signal.SIGTERM}:
        signal.signal(number, signal.SIG_IGN)
    # Only sigwaitinfo, in a thread of this process, returns the sender of a signal.
    if hasattr(signal, "sigwaitinfo"):
        signal.pthread_sigmask(signal.SIG_BLOCK, STOP_SIGNALS)
        threading.Thread(
            target=_end_on_sigterm_from, args=(parent,), name="stop-signals", daemon=True
        ).start()


def _end_on_sigterm_from(parent: int) -> None:
    while True:
        if signal.sigwaitinfo({signal.SIGTERM}).si_pid == parent:
            os._exit(0)


def name_fatal_signals() -> None:
    """Print the stacks on stderr if this process is killed by SIGBUS, SIGSEGV or the like.

    If a mapped file is truncated, reading the missing part kills the process before any Python code
    can react. Processes that are forked later print their stacks, too.
    """
    # Skip it if stderr is not a file, or other code has enabled it.
    with contextlib.suppress(AttributeError, OSError, RuntimeError, ValueError):
        if not faulthandler.is_enabled():
            faulthandler.enable()


def describe_exit(code: int) -> str:
    """Return how a process ended, from its exit code in the convention of `subprocess`."""
    if code >= 0:
        return f"exited with {code}"
    if -code == signal.SIGKILL:
        return "was killed by signal 9, in most cases for lack of memory"
    if -code == getattr(signal, "SIGBUS", None):
        return (
            f"was killed by signal {-code} (SIGBUS): a file that it had mapped became shorter, as "
            "a corpus that is rewritten in place, or a disk or /dev/shm was full or failed"
        )
    return f"was killed by signal {-code}"


def num_killed_for_memory() -> int | None:
    """Return how many processes of this control group the kernel has killed for lack of memory.

    None if the system does not provide the number.
    """
    for path in control_group_files("memory", "memory.events", "memory.oom_control"):
        with contextlib.suppress(OSError, ValueError):
            for line in path.read_text().splitlines():
                if line.startswith("oom_kill "):
                    return int(line.split()[1])
    return None


def control_group_files(controller: str, name: str, former_name: str) -> Iterator[Path]:
    """Yield where a file of this process' control group may be: in its group, then in the root.

    Args:
        controller: `memory`, `pids` ...
        name: name of the file in version 2 of control groups.
        former_name: its name in version 1.
    """
    with contextlib.suppress(OSError):
        for line in Path("/proc/self/cgroup").read_text().splitlines():
            number, controllers, path = line.split(":", 2)
            root, file = Path("/sys/fs/cgroup"), name
            if number != "0":
                if controller not in controllers.split(","):
                    continue
                root, file = root / controller, former_name
            yield root / path.lstrip("/") / file
            yield root / file


def exhausted_limit(error: BaseException) -> str | None:
    """Return how to raise the limit that refused a thread, a process or a file to `error`."""
    number = getattr(error, "errno", None)
    no_thread = ("can't start new thread", "Resource temporarily unavailable")  # Python's, C++'s
    if number == errno.EAGAIN or any(text in str(error) for text in no_thread):
        found = (limit_of_memory(), _limit_of_processes())
        named = [text for text in found if text is not None]
        return " and ".join(named) or "raise the number of threads that the machine allows"
    if number == errno.EMFILE or "Too many open files" in str(error):
        return _limit(resource.RLIMIT_NOFILE, "open files", "ulimit -n", str)
    return None


def limit_of_memory() -> str | None:
    """Return how to raise the limit of the address space; None if there is none."""
    limits = ((resource.RLIMIT_AS, "the address space", "ulimit -v"),
              (resource.RLIMIT_DATA, "the data segment", "ulimit -d"))  # fmt: skip
    found = (_limit(*each, lambda size: f"{size // 2**20:,} MiB") for each in limits)
    return next((text for text in found if text is not None), None)


def _limit_of_processes() -> str | None:
    for path in control_group_files("pids", "pids.max", "pids.max"):
        with contextlib.suppress(OSError):
            most = path.read_text(encoding="ascii").strip()
            if most != "max":
                return f"raise pids.max of the container or the job, now {most}"
    return _limit(resource.RLIMIT_NPROC, "processes and threads", "ulimit -u", str)


def _limit(number: int, what: str, command: str, shown: Callable[[int], str]) -> str | None:
    soft, _ = resource.getrlimit(number)
    if soft == resource.RLIM_INFINITY:
        return None
    return f"raise the limit of {what}, now {shown(soft)} ({command})"
