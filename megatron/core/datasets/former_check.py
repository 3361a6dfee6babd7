"""A check of a file that was made on this machine and need not be made again.

Proving that an index is sound reads every byte of it: a second for some hundred million sequences,
again for each process of a machine and each start. What the kernel says of a file (its size and
number, and when its content and its entry last changed) changes with any write to it, so a process
that finds all of that as it stood before an earlier check need not repeat the check. Records lie in
the temporary folder of the machine and count until it is started again, because only after a crash
can a file hold other bytes under the same description. No torch import.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import json
import os
import tempfile
import time
from collections.abc import Callable

_SETTLED_AFTER_NS = 2_000_000_000
"""Clocks of file systems are coarse: what changed a moment ago may change again unnoticed."""


def check_once(path: str, check: Callable[[], None]) -> bool:
    """Check a local file unless it passed before and stands as it did; return whether it ran.

    Args:
        check: raises if the file is not sound.
    """
    path = os.path.abspath(path)
    state, changed_ns = _state_of(path)
    folder = os.path.join(tempfile.gettempdir(), f"checked-corpora-{os.getuid()}")
    record = os.path.join(folder, hashlib.blake2b(path.encode(), digest_size=16).hexdigest())
    if state and _recorded(folder, record) == state:
        return False
    check()
    if state and time.time_ns() - changed_ns > _SETTLED_AFTER_NS:
        partial = f"{record}.{os.getpid()}.{time.monotonic_ns()}"
        with contextlib.suppress(OSError):  # without a record the next process checks again
            os.makedirs(folder, mode=0o700, exist_ok=True)
            with open(partial, "wb") as file:
                file.write(state)
            os.replace(partial, record)
    return True


def _recorded(folder: str, record: str) -> bytes:
    try:
        if os.stat(folder).st_uid != os.getuid():  # others may write there
            return b""
        with open(record, "rb") as file:
            return file.read()
    except OSError:
        return b""


def _state_of(path: str) -> tuple[bytes, int]:
    """Return the state of a file on this machine (empty if unknown) and its last change."""
    boot = _boot()
    if not boot:
        return b"", 0
    found = os.stat(path)
    place = [found.st_dev, found.st_ino, found.st_size, found.st_mtime_ns, found.st_ctime_ns]
    return json.dumps([boot, path, *place]).encode(), max(found.st_mtime_ns, found.st_ctime_ns)


@functools.cache
def _boot() -> str:
    """Return what Linux names this start of the machine, nothing elsewhere."""
    try:
        with open("/proc/sys/kernel/random/boot_id") as file:
            return file.read().strip()
    except OSError:
        return ""
