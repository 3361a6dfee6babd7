"""A file for tensors that come and go: each has a place of its own until it is given back."""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor

import torch
from torch import Tensor

from megatron.core.offload.file_state_store import (
    PAGE_BYTES,
    nameless_file,
    read_exactly,
    reserve_space,
    write_exactly,
)

MAX_UNWRITTEN_BYTES = 256 * 2**20
RESERVED_AT_ONCE = 64 * 2**20


class TensorFile:
    """A nameless file of a directory, with one thread that writes and one that reads.

    Steps repeat: a place that was given back serves the next tensor of as many bytes, and the file
    is as large as all tensors that were there at a time.
    """

    def __init__(self, directory: str, *, flag: str) -> None:
        """
        Args:
            flag: that named the directory.
        Raises:
            ConfigError: it is missing or not writable.
        """
        self._directory, self._flag = directory, flag
        self._file = nameless_file(directory, flag=flag)
        self._end = self._reserved = 0
        self._free: defaultdict[int, list[int]] = defaultdict(list)
        """Length of a place -> where such places begin that nobody has."""
        self._unwritten: deque[tuple[Future[None], int]] = deque()
        self.reader = ThreadPoolExecutor(1, thread_name_prefix="offload-reads")
        self._writer = ThreadPoolExecutor(1, thread_name_prefix="offload-writes")

    @property
    def num_bytes(self) -> int:
        """Length of all places, given back or not."""
        return self._end

    def take(self, num_bytes: int) -> int:
        """Return where a new place for `num_bytes` begins.

        Raises:
            ConfigError: the disk is too full.
        """
        length = _whole_pages(num_bytes)
        if self._free[length]:
            return self._free[length].pop()
        missing = self._end + length - self._reserved
        if missing > 0:
            more = max(missing, RESERVED_AT_ONCE)
            reserve_space(
                self._file, self._directory, self._reserved, more, flag=self._flag,
                rule="the disk has space for all that waits between forward and backward",
                fix="free space, name another disk, or offload or keep less",
            )  # fmt: skip
            self._reserved += more
        begin = self._end
        self._end += length
        return begin

    def give_back(self, begin: int, num_bytes: int) -> None:
        """Let others have a place, whose tensor nobody reads any more."""
        self._free[_whole_pages(num_bytes)].append(begin)

    def write(self, begin: int, num_bytes: int, source: Callable[[], Tensor]) -> Future[None]:
        """Start to write a tensor of the host to a place, which `source` waits for and returns.

        Waits itself while more than `MAX_UNWRITTEN_BYTES` were not written yet.
        """
        while self._unwritten:
            first, _ = self._unwritten[0]
            if not first.done() and self._waiting_bytes() + num_bytes <= MAX_UNWRITTEN_BYTES:
                break
            first.exception()
            self._unwritten.popleft()
        written = self._writer.submit(self._write, begin, source)
        self._unwritten.append((written, num_bytes))
        return written

    def _waiting_bytes(self) -> int:
        return sum(number for _, number in self._unwritten)

    def _write(self, begin: int, source: Callable[[], Tensor]) -> None:
        write_exactly(self._file, _bytes_of(source()), begin)

    def read(self, begin: int, target: Tensor) -> None:
        """Fill a tensor of the host from a place, in the thread that calls.

        Raises:
            OSError: reading failed.
        """
        read_exactly(self._file, _bytes_of(target), begin)


def _whole_pages(num_bytes: int) -> int:
    return -(-num_bytes // PAGE_BYTES) * PAGE_BYTES


def _bytes_of(tensor: Tensor) -> memoryview:
    """Return the bytes of a tensor whose elements have no gaps, in the order of memory."""
    flat = tensor.as_strided((tensor.numel(),), (1,))
    return flat.view(torch.uint8).numpy().data.cast("B")
