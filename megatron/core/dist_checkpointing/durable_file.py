"""A new file whose bytes go to the disk past the page cache, several runs of them at a time.

A thread copies a run of bytes into a buffer, hashes it there, and lets the disk take it from there
(O_DIRECT of Linux). A copy through the page cache costs the processor more than that, a disk kept
busy by one request at a time is slow, and what other programs left to be written is not waited for.
Disks take whole pages from whole pages: the ends of a run, less than a page each, go through the
page cache. Where a file system has no such writes, all of it does.
"""

from __future__ import annotations

import errno
import hashlib
import mmap
import os
import queue
from collections.abc import Sequence
from concurrent.futures import Future
from pathlib import Path
from types import TracebackType

import numpy as np

from megatron.core.dist_checkpointing.durable import start_writeback, write_at
from megatron.core.dist_checkpointing.shard_file import BLOCK_BYTES, HASH_NAME, PAGE_BYTES
from megatron.core.dist_checkpointing.work_threads import WorkThreads, threads_per_rank

WRITES_IN_FLIGHT = 8
"""Of a save that somebody waits for; more do not make a local disk faster."""
WRITES_IN_BACKGROUND = 2
"""The disk has one run while the other is hashed: it disturbs training least."""
WINDOW_BYTES = 1 << 20
"""What is copied, hashed and written at once: the cache of a core holds it, and the first use of
fresh memory costs several times the copy into it."""
_NO_DIRECT = {errno.EINVAL, errno.EOPNOTSUPP, errno.ENOTSUP, errno.ENOSYS}

_Part = tuple[memoryview, "Future[str]"]


class DurableFile:
    """See `shard_file.Sink`; what was put is on the disk when `finish` returns.

    Use as a context manager: creates the file, and closes it.

    Args:
        path: must not exist.
        num_bytes: how many will come; room for them is reserved.
        in_background: let others have the processor and the disk.
    Raises:
        OSError: the system refused.
    """

    def __init__(self, path: Path, num_bytes: int, *, in_background: bool = False) -> None:
        self._path, self._num_bytes = path, num_bytes
        self._most = WRITES_IN_BACKGROUND if in_background else WRITES_IN_FLIGHT
        self._in_background = in_background
        self._position = 0
        self._run: list[_Part] = []
        self._run_bytes = 0
        self._started: list[Future[None]] = []
        self._failure: OSError | None = None
        self._ends: list[tuple[int, bytes]] = []
        """(position, bytes): written last, because a disk is slower while both ways are in use."""

    def __enter__(self) -> DurableFile:
        flags = os.O_WRONLY | os.O_CLOEXEC
        self._cached = os.open(self._path, flags | os.O_CREAT | os.O_EXCL, 0o644)
        self._direct: int | None = None
        try:
            self._direct = self._open_direct(flags)
            num_threads = self._most
            if self._direct is None:
                num_threads = 1 if self._in_background else threads_per_rank()
            num_threads = min(num_threads, self._num_bytes // BLOCK_BYTES + 1)
            self._buffers: queue.SimpleQueue[np.ndarray] = queue.SimpleQueue()
            for _ in range(num_threads if self._direct is not None else 0):
                self._buffers.put(np.frombuffer(mmap.mmap(-1, WINDOW_BYTES), np.uint8))
        except BaseException:
            self._close()
            raise
        self._threads = WorkThreads(num_threads)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if error is not None and self._failure is None:
            self._failure = OSError(errno.ECANCELED, "given up")
        self._threads.__exit__(kind, error, trace)
        self._close()

    def put(self, data: memoryview | bytes) -> Future[str]:
        """Take the next bytes of the file, and return what will be their hash.

        Args:
            data: at most a block, unchanged until the hash is there.
        """
        assert len(data) <= BLOCK_BYTES
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
            work = self._threads.start(self._write_run, self._position, self._run)
            self._started.append(work)
            self._position += self._run_bytes
            self._run, self._run_bytes = [], 0

    def finish(self) -> None:
        """Wait until everything is on the disk."""
        self.begin()
        for work in self._started:
            work.result()
        for position, data in self._ends:
            write_at(self._cached, memoryview(data), position)
        os.fsync(self._cached)

    def _open_direct(self, flags: int) -> int | None:
        """Open the file a second time for writes past the page cache; None if there are none."""
        if not hasattr(os, "O_DIRECT"):
            return None
        try:
            direct = os.open(self._path, flags | os.O_DIRECT)
        except OSError as error:
            if error.errno in _NO_DIRECT:
                return None
            raise
        try:
            # Writes to reserved room need not wait for each other.
            os.posix_fallocate(direct, 0, max(1, self._num_bytes))
        except OSError as error:
            if error.errno not in _NO_DIRECT:
                os.close(direct)
                raise
        return direct

    def _close(self) -> None:
        os.close(self._cached)
        if self._direct is not None:
            os.close(self._direct)

    # In the threads -------------------------------------------------------------------------

    def _write_run(self, position: int, run: Sequence[_Part]) -> None:
        try:
            if self._failure is not None:
                raise self._failure
            if self._direct is None:
                self._write_cached(position, run)
            else:
                self._write_direct(self._direct, position, run)
        except BaseException as error:
            if isinstance(error, OSError):
                self._failure = error
            for _, found in run:
                if not found.done():
                    found.set_exception(error)
            raise

    def _write_cached(self, position: int, run: Sequence[_Part]) -> None:
        first = position
        for data, found in run:
            state = hashlib.new(HASH_NAME)
            for begin in range(0, len(data), WINDOW_BYTES):
                piece = data[begin : begin + WINDOW_BYTES]
                state.update(piece)
                write_at(self._cached, piece, position)
                position += len(piece)
            found.set_result(state.hexdigest())
        start_writeback(self._cached, first, position - first)

    def _write_direct(self, direct: int, position: int, run: Sequence[_Part]) -> None:
        buffer = self._buffers.get()
        try:
            hashes = []
            first = here = position % WINDOW_BYTES
            position -= here
            for data, _ in run:
                state, done = hashlib.new(HASH_NAME), 0
                while done < len(data):
                    count = min(len(data) - done, WINDOW_BYTES - here)
                    into = buffer[here : here + count]
                    np.copyto(into, np.frombuffer(data[done : done + count], np.uint8))
                    state.update(into.data)
                    done, here = done + count, here + count
                    if here == WINDOW_BYTES:
                        self._write_window(direct, buffer.data, first, here, position)
                        first, here, position = 0, 0, position + WINDOW_BYTES
                hashes.append(state.hexdigest())
            self._write_window(direct, buffer.data, first, here, position)
        finally:
            self._buffers.put(buffer)
        for (_, found), text in zip(run, hashes, strict=True):
            found.set_result(text)

    def _write_window(
        self, direct: int, window: memoryview, first: int, end: int, position: int
    ) -> None:
        """Write bytes first ... end - 1 of a window that begins at `position` of the file."""
        low, high = -(-first // PAGE_BYTES) * PAGE_BYTES, end // PAGE_BYTES * PAGE_BYTES
        if low < high:
            self._keep_end(window[first:low], position + first)
            first = low + _write_pages(direct, window[low:high], position + low)
        if end - first < 2 * PAGE_BYTES:
            self._keep_end(window[first:end], position + first)
        else:
            write_at(self._cached, window[first:end], position + first)

    def _keep_end(self, data: memoryview, position: int) -> None:
        if len(data):
            self._ends.append((position, bytes(data)))


def _write_pages(direct: int, data: memoryview, position: int) -> int:
    """Write whole pages past the page cache; return how many bytes the disk took that way."""
    done = 0
    while done < len(data) and done % PAGE_BYTES == 0:
        try:
            done += os.pwrite(direct, data[done:], position + done)
        except OSError as error:
            if error.errno not in _NO_DIRECT:
                raise
            break
    return done
