"""A new file, written at several offsets at a time, and on the disk when it is finished.

Each thread hashes a window of bytes and copies it to the page cache while the cache of its core
holds it; the disk begins with a run as soon as it is there. Windows are aligned in the file: the
system then takes each as one large block of pages instead of page by page, which costs the
processor less. (Writes past the page cache, O_DIRECT, were measured as well: steadier where other
programs fill that cache, but 15 % slower where two ranks share two cores, because the disk wants
memory aligned as tensors are not, and so another copy.)
"""

from __future__ import annotations

import errno
import hashlib
import os
from collections.abc import Sequence
from concurrent.futures import Future
from pathlib import Path

from megatron.core.dist_checkpointing.durable import start_writeback, write_at
from megatron.core.dist_checkpointing.shard_file import BLOCK_BYTES, HASH_NAME
from megatron.core.dist_checkpointing.thread_pool import ThreadPool, threads_per_rank

WINDOW_BYTES = 1 << 20
"""What is hashed and then copied at once; the cache of a core holds it."""

_Part = tuple[memoryview, "Future[str]"]


class DurableFile:
    """See `shard_file.Sink`; what was put is on the disk when `finish` returns.

    Use as a context manager: creates the file, and closes it.

    Args:
        path: must not exist.
        num_bytes: about how many will come.
        in_background: one thread, which disturbs training least. Otherwise two at least: while the
            disk lets one wait, the other hashes.
    Raises:
        OSError: the system refused.
    """

    def __init__(self, path: Path, num_bytes: int, *, in_background: bool = False) -> None:
        self._path = path
        most = 1 if in_background else max(2, threads_per_rank())
        self._num_threads = min(most, num_bytes // BLOCK_BYTES + 1)
        self._position = 0
        self._run: list[_Part] = []
        self._run_bytes = 0
        self._started: list[Future[None]] = []
        self._failure: OSError | None = None

    def __enter__(self) -> DurableFile:
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC
        self._descriptor = os.open(self._path, flags, 0o644)
        self._threads = ThreadPool(self._num_threads)
        return self

    def __exit__(self, kind: object, error: object, trace: object) -> None:
        if error is not None and self._failure is None:
            self._failure = OSError(errno.ECANCELED, "given up")
        self._threads.__exit__(kind, error, trace)
        os.close(self._descriptor)

    def put(self, data: memoryview | bytes) -> Future[str]:
        """Take the next bytes of the file, and return what will be their hash.

        Args:
            data: at most a block, unchanged until the hash is there.
        """
        if len(data) > BLOCK_BYTES:
            raise ValueError(f"{len(data)} bytes are more than a block of {BLOCK_BYTES}")
        if self._failure is not None:
            raise self._failure
        if self._run_bytes + len(data) > BLOCK_BYTES:
            self.begin()
        found: Future[str] = Future()
        self._run.append((memoryview(data), found))
        self._run_bytes += len(data)
        return found

    def begin(self) -> None:
        """Begin to write all that was put."""
        if self._run:
            self._started.append(self._threads.start(self._write_run, self._position, self._run))
            self._position += self._run_bytes
            self._run, self._run_bytes = [], 0

    def finish(self) -> None:
        """Wait until everything is on the disk."""
        self.begin()
        for work in self._started:
            work.result()
        os.fsync(self._descriptor)

    def _write_run(self, position: int, run: Sequence[_Part]) -> None:
        """Write parts that follow each other: in a thread."""
        try:
            if self._failure is not None:
                raise self._failure
            first = position
            for data, found in run:
                state, done = hashlib.new(HASH_NAME), 0
                while done < len(data):
                    piece = data[done : done + WINDOW_BYTES - position % WINDOW_BYTES]
                    state.update(piece)
                    write_at(self._descriptor, piece, position)
                    done, position = done + len(piece), position + len(piece)
                found.set_result(state.hexdigest())
            start_writeback(self._descriptor, first, position - first)
        except BaseException as error:
            if isinstance(error, OSError):
                self._failure = error
            for _, found in run:
                if not found.done():
                    found.set_exception(error)
            raise
