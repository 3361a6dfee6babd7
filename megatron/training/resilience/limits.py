"""Limits of the operating system that a failed call has met, and how to raise them."""

from __future__ import annotations

import contextlib
import errno
import resource
from collections.abc import Callable

from megatron.core.foundation.processes import control_group_files

_MIB = 2**20


def exhausted_limit(error: BaseException) -> str | None:
    """Return how to raise the limit that refused a thread, a process or a file to `error`."""
    number = getattr(error, "errno", None)
    if "can't start new thread" in str(error) or number == errno.EAGAIN:
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
    found = (_limit(*each, lambda size: f"{size // _MIB:,} MiB") for each in limits)
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
