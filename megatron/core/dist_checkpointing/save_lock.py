"""One run per save directory.

The lock is a POSIX record lock on a small file: the kernel drops it when the process ends, for
whatever reason, so there is no stale lock to argue about and no clock to compare; network file
systems pass it on. A record lock is not inherited by forked children (loader workers), which
would otherwise keep a dead run's lock. The file's text only serves the message.
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
"""How long to wait for a holder that is just ending (a restarted job overlaps its predecessor)."""

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
            # Opening and closing a file drops this process's locks on it: look before.
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
    """Unlock all directories that this process locks: it may not be the one to save again."""
    for lock in list(_HELD.values()):
        lock.release()


def _try_lock(descriptor: int, path: Path) -> bool:
    try:
        fcntl.lockf(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        if error.errno in (errno.EACCES, errno.EAGAIN):
            return False
        logger.warning(
            "%s: this file system has no locks (%s); two runs in one directory go unnoticed",
            path,
            error.strerror,
        )
    return True
