"""One run per save directory.

The lock is a POSIX record lock on a small file: the kernel drops it whenever the process ends, so
there are no stale locks and no clocks to compare. Network file systems support it. Forked children
(loader workers) do not inherit a record lock; otherwise they would keep the lock of a dead run. The
text of the file is only used in the message.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import json
import logging
import os
import socket
import time
from pathlib import Path

from megatron.core.dist_checkpointing.commit import make_directory
from megatron.core.dist_checkpointing.durable import describe_os_error
from megatron.core.foundation.errors import CheckpointError

SAVE_LOCK_NAME = ".lease"
GRACE_S = 5.0
"""Wait for a holder that is about to end (a restarted job overlaps its predecessor)."""

logger = logging.getLogger(__name__)
_HELD: dict[tuple[int, int], SaveLock] = {}


class SaveLock:
    """The right of this process to write into a directory, until `release` or its end."""

    def __init__(self, path: Path, descriptor: int) -> None:
        self.path = path
        self._descriptor: int | None = descriptor
        status = os.fstat(descriptor)
        self._identity = (status.st_dev, status.st_ino)
        _HELD[self._identity] = self

    def release(self) -> None:
        """Unlock the directory; the file stays."""
        if self._descriptor is not None:
            _HELD.pop(self._identity, None)
            os.close(self._descriptor)
            self._descriptor = None

    @classmethod
    def acquire(cls, directory: str | os.PathLike[str], *, grace_s: float = GRACE_S) -> SaveLock:
        """Take the lock of a save directory, which is created if need be.

        A process that already holds it gets the same lock again. A file system without locks
        grants it with a warning.

        Raises:
            CheckpointError: another run holds it; the message names its host, process and start.
        """
        path = Path(directory) / SAVE_LOCK_NAME
        try:
            make_directory(path.parent)
            # Opening and closing a file drops this process's locks on it, so check first.
            with contextlib.suppress(FileNotFoundError):
                status = os.stat(path)
                held = _HELD.get((status.st_dev, status.st_ino))
                if held is not None:
                    return held
            flags = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW
            descriptor = os.open(path, flags, 0o644)
        except OSError as error:
            raise describe_os_error(error, path=path, doing="opening") from error
        deadline = time.monotonic() + grace_s
        while not _try_lock(descriptor, path):
            if time.monotonic() >= deadline:
                holder = os.pread(descriptor, 1000, 0).decode("utf-8", errors="replace").strip()
                os.close(descriptor)
                raise CheckpointError(
                    f"another run is saving into {path.parent}: {holder or 'holder unknown'}",
                    rule="one run per save directory",
                    flags=["--save"],
                    fix="stop that run, or give this one another directory",
                )
            time.sleep(0.1)
        mine = {
            "host": socket.gethostname(),
            "pid": os.getpid(),
            "started": time.strftime("%Y-%m-%dT%H:%M:%S%z"),
        }
        os.ftruncate(descriptor, 0)
        os.pwrite(descriptor, json.dumps(mine).encode() + b"\n", 0)
        return cls(path, descriptor)


def release_all() -> None:
    """Unlock all directories that this process locks: another process may save next."""
    for lock in list(_HELD.values()):
        lock.release()


def _try_lock(descriptor: int, path: Path) -> bool:
    try:
        fcntl.lockf(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        if error.errno in (errno.EACCES, errno.EAGAIN):
            return False
        logger.warning(
            "%s: this file system has no locks (%s); two runs in one directory are not detected",
            path,
            error.strerror,
        )
    return True
