"""Columns in a file: read ahead, changed in memory, written back after the computation.

S. Rajbhandari et al., "ZeRO-Infinity: Breaking the GPU Memory Wall for Extreme Scale Deep
Learning", section 6.3, arXiv 2104.07857. A few buffers of one chunk each are all the memory this
takes, whatever the size of the file. The file has no name once it is open: it is gone when the
process is, however it ends.
"""

from __future__ import annotations

import errno
import mmap
import os
import tempfile
from collections import deque
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

import torch
from torch import Tensor

from megatron.core.foundation.errors import ConfigError
from megatron.core.offload.host_state_store import chunk_ranges

NUM_BUFFERS = 4
"""Chunks in memory: one computed on, and reads before it and writes after it."""
PAGE_BYTES = 4096


class FileStateStore:
    """See `StateStore`. One reader and one writer thread; both release the interpreter lock."""

    device = torch.device("cpu")

    def __init__(
        self,
        directory: str | os.PathLike[str],
        block_bytes: Sequence[int],
        num_blocks: int,
        *,
        chunk_blocks: int,
        is_pinned: bool = False,
    ) -> None:
        """
        Args:
            directory: on the disk to be used; the space is reserved at once.
            is_pinned: let the buffers be memory that a device copies from and to by itself.
        Raises:
            ConfigError: the directory is missing or not writable, or the disk is too full.
        """
        self.chunks = chunk_ranges(num_blocks, chunk_blocks)
        self._block_bytes, self._num_blocks = list(block_bytes), num_blocks
        self._offsets: list[int] = []
        total = 0
        for size in block_bytes:
            self._offsets.append(total)
            total += -(-size * num_blocks // PAGE_BYTES) * PAGE_BYTES
        self.num_bytes = total
        self._file = reserve_file(directory, total, flag="--optimizer-offload-path")
        self._map: mmap.mmap | None = None
        self._buffers = [
            [
                torch.empty(chunk_blocks, size, dtype=torch.uint8, pin_memory=is_pinned)
                for size in block_bytes
            ]
            for _ in range(min(NUM_BUFFERS, len(self.chunks)))
        ]
        self._threads = ThreadPoolExecutor(2, thread_name_prefix="offload")

    @property
    def buffer_bytes(self) -> int:
        """Host memory that this store takes."""
        return sum(part.nbytes for buffer in self._buffers for part in buffer)

    def sweep(self) -> Iterator[tuple[int, list[Tensor]]]:
        """See `StateStore.sweep`.

        Raises:
            OSError: reading or writing failed; the store is then of no use.
        """
        idle: deque[tuple[list[Tensor], Future[None] | None]] = deque(
            (buffer, None) for buffer in self._buffers
        )
        reading: deque[tuple[int, list[Tensor], Future[None]]] = deque()
        """(chunk, its buffer, its read), in order."""
        upcoming = iter(range(len(self.chunks)))

        def read_ahead() -> None:
            """Start reads into all buffers whose last write is over, at least into one."""
            while idle and (not reading or idle[0][1] is None or idle[0][1].done()):
                number = next(upcoming, None)
                if number is None:
                    return
                buffer, written = idle.popleft()
                if written is not None:
                    written.result()
                reading.append((number, buffer, self._threads.submit(self._read, number, buffer)))

        try:
            read_ahead()
            while reading:
                number, buffer, arrived = reading.popleft()
                arrived.result()
                yield number, self._parts(number, buffer)
                idle.append((buffer, self._threads.submit(self._write, number, buffer)))
                read_ahead()
        finally:
            # Also when the caller stops half-way: nobody may touch the buffers afterwards.
            for _, _, arrived in reading:
                arrived.exception()
            for _, written in idle:
                if written is not None:
                    written.result()

    def column(self, number: int) -> Tensor:
        """See `StateStore.column`: a view of the mapped file, of which pages come and go."""
        if self._map is None:
            self._map = mmap.mmap(self._file, self.num_bytes)
        size = self._block_bytes[number]
        flat = torch.frombuffer(
            self._map, dtype=torch.uint8, count=size * self._num_blocks,
            offset=self._offsets[number],
        )  # fmt: skip
        return flat.view(self._num_blocks, size)

    def close(self) -> None:
        """Stop the threads and free the disk space."""
        self._threads.shutdown()
        os.close(self._file)
        self._buffers = []

    def _parts(self, chunk: int, buffer: list[Tensor]) -> list[Tensor]:
        begin, end = self.chunks[chunk]
        return [part[: end - begin] for part in buffer]

    def _starts(self, chunk: int) -> list[int]:
        """Return where the chunk begins in the file, in each column."""
        begin, _ = self.chunks[chunk]
        return [
            offset + begin * size
            for offset, size in zip(self._offsets, self._block_bytes, strict=True)
        ]

    def _read(self, chunk: int, buffer: list[Tensor]) -> None:
        for offset, part in zip(self._starts(chunk), self._parts(chunk, buffer), strict=True):
            read_exactly(self._file, part.numpy().data.cast("B"), offset)

    def _write(self, chunk: int, buffer: list[Tensor]) -> None:
        for offset, part in zip(self._starts(chunk), self._parts(chunk, buffer), strict=True):
            write_exactly(self._file, part.numpy().data.cast("B"), offset)


def reserve_file(directory: str | os.PathLike[str], num_bytes: int, *, flag: str) -> int:
    """Open a nameless file with `num_bytes` reserved on the disk of `directory`.

    Raises:
        ConfigError: the directory is missing or not writable, or the disk is too full.
    """
    file = nameless_file(directory, flag=flag)
    try:
        reserve_space(
            file, directory, 0, max(num_bytes, 1), flag=flag,
            rule="the space for all state is reserved before training starts",
            fix="free space, name another disk, lower --optimizer-offload-fraction, or shard"
            " with --use-distributed-optimizer",
        )  # fmt: skip
    except ConfigError:
        os.close(file)
        raise
    return file


def nameless_file(directory: str | os.PathLike[str], *, flag: str) -> int:
    """Open a file of `directory` that is gone when this process is.

    Raises:
        ConfigError: the directory is missing or not writable.
    """
    try:
        file, name = tempfile.mkstemp(dir=directory, prefix="offload-")
        os.unlink(name)
    except OSError as error:
        raise ConfigError(
            f"what is offloaded cannot be kept in {directory}: {error.strerror or error}.",
            rule="the directory exists on every node and can be written to",
            flags=[flag],
            fix="create it, or name a directory on a local disk",
        ) from None
    return file


def reserve_space(
    file: int,
    directory: str | os.PathLike[str],
    begin: int,
    num_bytes: int,
    *,
    flag: str,
    rule: str,
    fix: str,
) -> None:
    """Reserve `num_bytes` from `begin` on in a file of `directory`.

    Raises:
        ConfigError: the disk is too full; with this rule and fix.
    """
    directory = Path(directory)
    try:
        # First: where a file system cannot reserve, the C library writes until the disk is full.
        if num_bytes > _free_bytes(directory):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        if hasattr(os, "posix_fallocate"):
            os.posix_fallocate(file, begin, num_bytes)
        else:
            os.ftruncate(file, begin + num_bytes)
    except OSError as error:
        more = " more" if begin else ""
        raise ConfigError(
            f"what is offloaded needs {num_bytes / 2**20:,.0f} MiB{more} for this rank in"
            f" {directory}, which has {_free_bytes(directory) / 2**20:,.0f} MiB free"
            f" ({error.strerror or error}).",
            rule=rule,
            flags=[flag],
            fix=fix,
        ) from None


def read_exactly(file: int, view: memoryview, offset: int) -> None:
    """Fill a view from a file, from `offset` on.

    Raises:
        OSError: reading failed.
    """
    while view:
        count = os.preadv(file, [view], offset)
        if count == 0:
            raise OSError(errno.EIO, "the file of what is offloaded is shorter than it was")
        view, offset = view[count:], offset + count


def write_exactly(file: int, view: memoryview, offset: int) -> None:
    """Write a view to a file, from `offset` on.

    Raises:
        OSError: writing failed.
    """
    while view:
        count = os.pwrite(file, view, offset)
        view, offset = view[count:], offset + count


def _free_bytes(directory: Path) -> int:
    found = os.statvfs(directory)
    return found.f_bavail * found.f_frsize
