"""Optimizer state outside of the device: columns of bytes in host memory or in a file.

A store has several columns with the same number of blocks. The caller visits all chunks of blocks
in order and changes the bytes in place; the store keeps them and copies them.

Columns in a file are read ahead, changed in memory and written back after the computation (S.
Rajbhandari et al., "ZeRO-Infinity: Breaking the GPU Memory Wall for Extreme Scale Deep Learning",
section 6.3, arXiv 2104.07857). They take a few buffers of one chunk each in memory, for any size of
the file. The file has no name once it is open, so it is deleted when the process ends.
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
from typing import Protocol

import torch
from torch import Tensor

from megatron.core.foundation.errors import ConfigError

NUM_BUFFERS = 4
"""Chunks in memory: one being computed, and chunks being read and written."""
PAGE_BYTES = 4096
RESERVE = 0.05
"""Share of the available memory that is not used."""


def chunk_ranges(num_blocks: int, chunk_blocks: int) -> list[tuple[int, int]]:
    """Cut [0, num_blocks) into chunks of at most `chunk_blocks`."""
    return [
        (begin, min(begin + chunk_blocks, num_blocks))
        for begin in range(0, num_blocks, chunk_blocks)
    ]


class StateStore(Protocol):
    """Columns of bytes, visited chunk by chunk."""

    chunks: list[tuple[int, int]]
    """[begin, end) of each chunk, in blocks."""
    device: torch.device
    """The device of the chunks that `sweep` yields."""

    def sweep(self) -> Iterator[tuple[int, list[Tensor]]]:
        """Yield (number of the chunk, its part of each column), uint8 [blocks, block_bytes].

        Changes in place are kept. A part is invalid once the next one has been requested.
        """
        ...

    def column(self, number: int) -> Tensor:
        """Return a column, uint8 [num_blocks, block_bytes]; changes in place are kept."""
        ...


class HostStateStore(StateStore):
    """Columns in the memory of a device or of the host."""

    def __init__(
        self,
        block_bytes: Sequence[int],
        num_blocks: int,
        *,
        chunk_blocks: int,
        device: torch.device,
        is_pinned: bool = False,
    ) -> None:
        """
        Args:
            block_bytes: bytes of a block in each column.
            is_pinned: pinned host memory, which a device copies asynchronously.
        """
        self.device = device
        self.chunks = chunk_ranges(num_blocks, chunk_blocks)
        self._columns = [
            torch.zeros(num_blocks, size, dtype=torch.uint8, device=device, pin_memory=is_pinned)
            for size in block_bytes
        ]

    def sweep(self) -> Iterator[tuple[int, list[Tensor]]]:
        for number, (begin, end) in enumerate(self.chunks):
            yield number, [column[begin:end] for column in self._columns]

    def column(self, number: int) -> Tensor:
        return self._columns[number]


class FileStateStore(StateStore):
    """Columns in a file. Two threads read and write; both release the interpreter lock."""

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
            is_pinned: the buffers are pinned memory, which a device copies asynchronously.
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

    def sweep(self) -> Iterator[tuple[int, list[Tensor]]]:
        """Yield each chunk; the next ones are read and the last ones written meanwhile.

        Raises:
            OSError: reading or writing failed; the store is then unusable.
        """
        idle: deque[tuple[list[Tensor], Future[None] | None]] = deque(
            (buffer, None) for buffer in self._buffers
        )
        reading: deque[tuple[int, list[Tensor], Future[None]]] = deque()
        """(chunk, its buffer, its read), in order."""
        upcoming = iter(range(len(self.chunks)))

        def read_ahead() -> None:
            """Start reads into all buffers whose last write has ended, at least into one."""
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
            # Also when the caller stops half-way: no thread may touch the buffers afterwards.
            for _, _, arrived in reading:
                arrived.exception()
            for _, written in idle:
                if written is not None:
                    written.result()

    def column(self, number: int) -> Tensor:
        """Return a view of the mapped file; the system loads and drops its pages."""
        if self._map is None:
            self._map = mmap.mmap(self._file, self.num_bytes)
        size = self._block_bytes[number]
        flat = torch.frombuffer(
            self._map, dtype=torch.uint8, count=size * self._num_blocks,
            offset=self._offsets[number],
        )  # fmt: skip
        return flat.view(self._num_blocks, size)

    def _parts(self, chunk: int, buffer: list[Tensor]) -> list[Tensor]:
        begin, end = self.chunks[chunk]
        return [part[: end - begin] for part in buffer]

    def _starts(self, chunk: int) -> list[int]:
        """Return the position of the chunk in the file, for each column."""
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
    """Open a nameless file of `num_bytes` zeros in `directory`, with the disk space reserved.

    Args:
        flag: the flag that named the directory.
    Raises:
        ConfigError: the directory is missing or not writable, or the disk is too full.
    """
    try:
        file, name = tempfile.mkstemp(dir=directory, prefix="offload-")
        os.unlink(name)
    except OSError as error:
        raise ConfigError(
            f"offloaded state cannot be stored in {directory}: {error.strerror or error}.",
            rule="the directory exists on every node and is writable",
            flags=[flag],
            fix="create it, or name a directory on a local disk",
        ) from None
    num_bytes = max(num_bytes, 1)
    try:
        # Check first: if a file system cannot reserve, the C library writes until the disk is full.
        if num_bytes > _free_bytes(directory):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        if hasattr(os, "posix_fallocate"):
            os.posix_fallocate(file, 0, num_bytes)
        else:
            os.ftruncate(file, num_bytes)
    except OSError as error:
        os.close(file)
        raise ConfigError(
            f"offloading needs {num_bytes / 2**20:,.0f} MiB for this rank in {directory}, which"
            f" has {_free_bytes(directory) / 2**20:,.0f} MiB free ({error.strerror or error}).",
            rule="the space for all state is reserved before training starts",
            flags=[flag],
            fix="free space, name another disk, lower --optimizer-offload-fraction, or shard"
            " with --use-distributed-optimizer",
        ) from None
    return file


def read_exactly(file: int, view: memoryview, offset: int) -> None:
    """Fill a view from a file, from `offset` on.

    Raises:
        OSError: reading failed.
    """
    while view:
        count = os.preadv(file, [view], offset)
        if count == 0:
            raise OSError(errno.EIO, "the file of offloaded state has become shorter")
        view, offset = view[count:], offset + count


def write_exactly(file: int, view: memoryview, offset: int) -> None:
    """Write a view to a file, from `offset` on.

    Raises:
        OSError: writing failed.
    """
    while view:
        count = os.pwrite(file, view, offset)
        view, offset = view[count:], offset + count


def _free_bytes(directory: str | os.PathLike[str]) -> int:
    found = os.statvfs(directory)
    return found.f_bavail * found.f_frsize


def available_host_bytes(root: Path = Path("/")) -> int | None:
    """Return the free bytes of the machine or of the process's memory cgroup; None if unknown.

    Page cache counts as available: the kernel frees it on demand.

    Args:
        root: root of the file system that contains /proc and /sys.
    """
    found = [_from_meminfo(root / "proc/meminfo"), *_from_cgroups(root)]
    known = [value for value in found if value is not None]
    return min(known) if known else None


def host_memory_problem(
    needed_bytes: int, what: str, *, num_local_ranks: int = 1, available: int | None = None
) -> ConfigError | None:
    """Return the problem if the ranks of this machine together need more memory than is available.

    Args:
        needed_bytes: bytes that one rank needs.
        what: "optimizer state", for the message.
        num_local_ranks: ranks on this machine that will allocate as much.
        available: bytes; None reads `available_host_bytes`.
    """
    available = available_host_bytes() if available is None else available
    total = needed_bytes * num_local_ranks
    if available is None or total <= available * (1 - RESERVE):
        return None
    return ConfigError(
        f"{what} in host memory needs {_mib(needed_bytes)} per rank, {_mib(total)} for the"
        f" {num_local_ranks} ranks of this machine, which has {_mib(available)} left.",
        rule="offloaded state fits into host memory, with 5 % to spare",
        flags=["--optimizer-cpu-offload", "--optimizer-offload-fraction"],
        fix="lower --optimizer-offload-fraction, or keep the state in files with"
        " --optimizer-offload-path DIRECTORY",
    )


def _from_meminfo(path: Path) -> int | None:
    try:
        lines = path.read_text().splitlines()
    except OSError:
        return None
    for line in lines:
        if line.startswith("MemAvailable:"):
            return int(line.split()[1]) * 1024
    return None


def _from_cgroups(root: Path) -> list[int | None]:
    """Return the free bytes of each enclosing cgroup: version 2, or 1 where that is mounted."""
    found: list[int | None] = []
    try:
        lines = (root / "proc/self/cgroup").read_text().splitlines()
    except OSError:
        return found
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if controllers not in ("", "memory"):
            continue
        top = root / "sys/fs/cgroup" / controllers
        names = ("memory.max", "memory.current")
        if controllers:
            names = ("memory.limit_in_bytes", "memory.usage_in_bytes")
        limit_directory = top / path.lstrip("/")
        while limit_directory == top or top in limit_directory.parents:
            found.append(_left(limit_directory, *names))
            limit_directory = limit_directory.parent
    return found


def _left(limit_directory: Path, limit_name: str, usage_name: str) -> int | None:
    try:
        limit = (limit_directory / limit_name).read_text().strip()
        used = int((limit_directory / usage_name).read_text())
        stat = (limit_directory / "memory.stat").read_text().splitlines()
    except (OSError, ValueError):
        return None
    if limit == "max":
        return None
    pairs = (line.split() for line in stat)
    cache = sum(int(value) for name, value in pairs if name in ("inactive_file", "active_file"))
    return max(0, int(limit) - used + cache)


def _mib(num_bytes: int) -> str:
    return f"{num_bytes / 2**20:,.0f} MiB"
