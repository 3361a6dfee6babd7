"""A check of a file that was made on this machine and need not be made again.

Proving that an index is sound reads every byte of it: a second for some hundred million sequences,
again for each process of a machine and each start. What the kernel says of a file (its size and
number, and when its content and its entry last changed) changes with any write to it, so a process
that finds all of that as it stood before an earlier check need not repeat the check. Records are in
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
from collections.abc import Callable, Iterator

_SETTLED_AFTER_NS = 2_000_000_000
"""Clocks of file systems are coarse: what changed a moment ago may change again unnoticed."""
_MAX_BYTES = 1 << 16


def check_once(path: str, check: Callable[[], None]) -> bool:
    """Check a local file unless it passed before and stands as it did; return whether it ran.

    Args:
        check: raises if the file is not sound.
    """
    path = os.path.abspath(path)
    state, changed_ns = _state_of(path)
    folder = os.path.join(tempfile.gettempdir(), f"checked-corpora-{os.getuid()}")
    name = hashlib.blake2b(path.encode(), digest_size=16).hexdigest()
    if state and _recorded(folder, name) == state:
        return False
    check()
    if state and time.time_ns() - changed_ns > _SETTLED_AFTER_NS:
        with contextlib.suppress(OSError):  # without a record the next process checks again
            os.makedirs(folder, mode=0o700, exist_ok=True)
            _record(folder, name, state)
    return True


@contextlib.contextmanager
def _opened(folder: str) -> Iterator[int]:
    """Open the folder of the records: others can make one of its name in a shared folder first.

    Raises:
        OSError: it is a link, or somebody else's, or others may write or read there.
    """
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    try:
        found = os.fstat(descriptor)
        if found.st_uid != os.getuid() or found.st_mode & 0o077:
            raise PermissionError(f"{folder} is not a folder of this user alone")
        yield descriptor
    finally:
        os.close(descriptor)


def _record(folder: str, name: str, state: bytes) -> None:
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
    partial = f"{name}.{os.getpid()}.{time.monotonic_ns()}"
    with _opened(folder) as folder_fd:
        with open(os.open(partial, flags, 0o600, dir_fd=folder_fd), "wb") as file:
            file.write(state)
        os.replace(partial, name, src_dir_fd=folder_fd, dst_dir_fd=folder_fd)


def _recorded(folder: str, name: str) -> bytes:
    try:
        with _opened(folder) as folder_fd:
            flags = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
            with open(os.open(name, flags, dir_fd=folder_fd), "rb") as file:
                return file.read(_MAX_BYTES)
    except OSError:
        return b""


def _state_of(path: str) -> tuple[bytes, int]:
    """Return the state of a file on this machine (empty if unknown) and its last change."""
    boot = _boot()
    if not boot:
        return b"", 0
    found = os.stat(path)
    identity = [found.st_dev, found.st_ino, found.st_size, found.st_mtime_ns, found.st_ctime_ns]
    return json.dumps([boot, path, *identity]).encode(), max(found.st_mtime_ns, found.st_ctime_ns)


@functools.cache
def _boot() -> str:
    """Return what Linux names this start of the machine, nothing elsewhere."""
    try:
        with open("/proc/sys/kernel/random/boot_id") as file:
            return file.read().strip()
    except OSError:
        return ""
