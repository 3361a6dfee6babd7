"""A buffer of one rank that the other ranks of its machine read in place.

A rank allocates gradients or parameters in a `SharedBuffer`. The others map it, so that a reduction
adds what it reads there and a gather copies it: each byte moves once, and no rank needs a receive
buffer. (Loopback TCP copies each byte four times; the slots of `shm_collectives`, which serve
tensors in any memory, twice.)

    memfd:  progress counters, offsets | flat values

A progress counter says how many steps of one bucket's communication this rank has done, and only
ever grows; an offset says where the values of that bucket are now. A rank writes both and wakes the
others; a rank that waits sleeps in the kernel, notices a rank that died, and fails after the
timeout of the group. The buffer does not interpret the counters: its user numbers the steps.

The memfd has no name and takes no space in /dev/shm. Where it cannot be created the values are
ordinary memory, `peers` returns None, and the caller uses the backend of its group; so it does on
processors that may make a counter visible before the values that were written ahead of it.
"""

from __future__ import annotations

import fcntl
import mmap
import os
import platform
import sys
import weakref
from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from megatron.core.transport import backend
from megatron.core.transport.shm.shm_collectives import (
    ShmGroup,
    all_ranks_can,
    is_off,
    open_shm_group,
)

_KEEPS_ORDER = platform.machine() in ("x86_64", "AMD64")
"""Whether other cores see the stores of a core in their order, without a fence."""
MAX_STEPS = 8
"""More than the steps that a counter counts between `begin` and the next one."""


class SharedBuffer:
    """Flat memory of this rank, zero at first, which ranks of the same machine can read."""

    def __init__(
        self, num_bytes: int, num_counters: int, *, reserve: Callable[[int], int] | None = None
    ) -> None:
        """
        Args:
            num_bytes: of the values.
            num_counters: buckets, each with a progress counter.
            reserve: opens a file of so many zero bytes, which then backs the values instead of
                memory: see `prefetch` and `page_out`.
        """
        self.num_counters = num_counters
        self._start = round_up_to_pages(16 * num_counters)
        self._length = self._start + round_up_to_pages(num_bytes)
        self._file = _file_in_memory(self._length) if reserve is None else reserve(self._length)
        self._memory = mmap.mmap(-1 if self._file is None else self._file, self._length)
        if self._file is not None:
            weakref.finalize(self, os.close, self._file)
        self._counters = memoryview(self._memory).cast("q")
        self._address = torch.frombuffer(self._memory, dtype=torch.uint8).data_ptr()
        self._peers: weakref.WeakKeyDictionary[dist.ProcessGroup, PeerBuffers | None]
        self._peers = weakref.WeakKeyDictionary()
        self._num_begun = [0] * num_counters

    @property
    def is_shared(self) -> bool:
        """Whether the ranks of all groups that asked for it can read it."""
        return bool(self._peers) and None not in self._peers.values()

    @property
    def has_file(self) -> bool:
        """Whether the values are in a file, in memory or on a disk, that others can open."""
        return self._file is not None

    def open_file(self) -> int:
        """Return another descriptor of the file, to be closed by the caller."""
        assert self._file is not None
        return os.dup(self._file)

    def offset_of(self, begin: int) -> int:
        """Return where byte `begin` of the values is in the file."""
        return self._start + begin

    def tensor(self, dtype: torch.dtype, begin: int, numel: int) -> Tensor:
        """Return [numel] values from byte `begin` on."""
        return torch.frombuffer(self._memory, dtype=dtype, count=numel, offset=self._start + begin)

    def begin(self, index: int) -> int:
        """Return the value that the counter exceeds from now on: all ranks begin in one order."""
        self._num_begun[index] += 1
        return self._num_begun[index] * MAX_STEPS

    def publish_progress(self, index: int, value: int, shown: Tensor | None = None) -> None:
        """Set a progress counter to `value`, and publish which values may be read now.

        Args:
            index: the bucket.
            shown: contiguous values of this buffer; None if the others know where they are.
        """
        if shown is not None:
            offset = shown.data_ptr() - self._address
            assert self._start <= offset <= self._length - shown.nbytes, (offset, self._length)
            self._counters[self.num_counters + index] = offset
        self._counters[index] = value
        for peers in self._peers.values():
            if peers is not None:
                peers.wake_peers()

    def wait_for_readers(self) -> None:
        """Wait until the counters of all other ranks have reached those of this one."""
        for peers in self._peers.values():
            if peers is not None:
                for index in range(self.num_counters):
                    peers.progress_of_others(index, self._counters[index]).wait()

    def prefetch(self, values: Tensor) -> None:
        """Start to read `values` from the file."""
        self._advise(values, mmap.MADV_WILLNEED)

    def page_out(self, values: Tensor) -> None:
        """Unmap the pages of `values`; they stay in the file."""
        self._advise(values, mmap.MADV_DONTNEED)

    def _advise(self, values: Tensor, advice: int) -> None:
        offset = values.data_ptr() - self._address
        first = offset - offset % mmap.PAGESIZE
        self._memory.madvise(advice, first, round_up_to_pages(offset + values.nbytes - first))

    def discard(self, values: Tensor) -> None:
        """Return the pages of `values`, full pages, to the system (Linux): they are zero."""
        if sys.platform == "linux":
            self._advise(values, mmap.MADV_REMOVE)

    def peers(self, group: dist.ProcessGroup) -> PeerBuffers | None:
        """Return the same memory of the other ranks of `group`; None where it cannot be read.

        Communication: at the first call those of `open_shm_group`, an all-gather and an all-reduce
        of a few bytes on `group`; the same answer on all ranks.
        """
        if group not in self._peers:
            self._peers[group] = self._share(group)
        return self._peers[group]

    def _share(self, group: dist.ProcessGroup) -> PeerBuffers | None:
        exchange = open_shm_group(group)
        if exchange is None or not _KEEPS_ORDER:
            return None
        own = _File(0, 0, 0, 0, self._length)
        if self._file is not None:
            own = _File.of(self._file, self._length)
        mine = torch.tensor(own)
        found = {
            rank: _File(*(int(entry) for entry in entries))
            for rank, entries in enumerate(backend.all_gather(mine, group))
            if rank != group.rank()
        }
        others = {rank: _map_of(file) for rank, file in found.items()}
        is_mapped = self._file is not None and None not in others.values()
        if not all_ranks_can(is_mapped, group):
            return None
        maps = {rank: memory for rank, memory in others.items() if memory is not None}
        return PeerBuffers(self, exchange, maps, found)


class PeerBuffers:
    """The `SharedBuffer`s of equal layout of the other ranks of a group."""

    def __init__(
        self,
        own: SharedBuffer,
        exchange: ShmGroup,
        maps: dict[int, mmap.mmap],
        files: dict[int, _File],
    ) -> None:
        self._own = weakref.proxy(own)
        self._files = files
        self._exchange = exchange
        self._maps = maps
        self._addresses = {
            rank: torch.frombuffer(memory, dtype=torch.uint8).data_ptr()
            for rank, memory in maps.items()
        }
        self._counters = {rank: memoryview(memory).cast("q") for rank, memory in maps.items()}

    @property
    def rank(self) -> int:
        """Position of this rank in the group."""
        return self._exchange.rank

    @property
    def size(self) -> int:
        """Ranks of the group."""
        return self._exchange.size

    def open_files(self) -> list[int]:
        """Return descriptors of the files of all ranks, to be closed by the caller.

        Raises:
            OSError: a rank is gone.
        """
        opened: list[int] = []
        try:
            for rank in range(self.size):
                opened.append(
                    self._own.open_file() if rank == self.rank else self._files[rank].open()
                )
        except OSError:
            for file in opened:
                os.close(file)
            raise
        return opened

    def wake_peers(self) -> None:
        """Wake the ranks that wait for this one."""
        self._exchange.wake_peers()

    def read(self, rank: int, index: int, begin: int, like: Tensor) -> Tensor:
        """Return a view [n] of what `rank` has published for a bucket; not to be written to.

        Call `unmap` when they are read: until then their pages count as resident here, too.

        Args:
            begin: the first element.
            like: [n], as many elements, of this dtype.
        """
        counters = self._counters[rank]
        offset = counters[self._own.num_counters + index] + begin * like.element_size()
        return torch.frombuffer(
            self._maps[rank], dtype=like.dtype, count=like.numel(), offset=offset
        )

    def unmap(self, rank: int, values: Tensor) -> None:
        """Unmap the pages of what `read` returned."""
        offset = values.data_ptr() - self._addresses[rank]
        first = offset - offset % mmap.PAGESIZE
        self._maps[rank].madvise(
            mmap.MADV_DONTNEED, first, round_up_to_pages(offset + values.nbytes - first)
        )

    def progress_of_others(self, index: int, value: int) -> ProgressWork:
        """Return a handle that is complete when all other counters have reached `value`."""
        return ProgressWork(self, index, value)

    def lagging_ranks(self, index: int, value: int) -> list[int]:
        """Return the ranks whose counter is below `value`."""
        return [rank for rank in self._maps if not self._has_reached(rank, index, value)]

    def wait_for_progress(self, index: int, value: int) -> None:
        """Wait until all other counters have reached `value`."""
        for rank in self.lagging_ranks(index, value):
            self._exchange.wait_until(rank, partial(self._has_reached, rank, index, value))

    def _has_reached(self, rank: int, index: int, value: int) -> bool:
        return self._counters[rank][index] >= value


class ProgressWork:
    """A handle like those of torch.distributed."""

    def __init__(self, peers: PeerBuffers, index: int, value: int) -> None:
        self._peers, self._index, self._value = peers, index, value

    def is_completed(self) -> bool:
        """Return whether all other ranks have got there."""
        return not self._peers.lagging_ranks(self._index, self._value)

    def wait(self) -> None:
        """Sleep until they have got there."""
        self._peers.wait_for_progress(self._index, self._value)


def round_up_to_pages(num_bytes: int) -> int:
    """Round up to whole pages, at least one."""
    return -(-max(num_bytes, 1) // mmap.PAGESIZE) * mmap.PAGESIZE


def _file_in_memory(length: int) -> int | None:
    """Open a nameless file of zeros; None where the system has none or it is not wanted."""
    if sys.platform != "linux" or is_off():
        return None
    try:
        descriptor = os.memfd_create("megatron", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    except OSError:
        return None
    os.ftruncate(descriptor, length)
    # Who maps a file that was cut off dies of SIGBUS; nobody can cut this one.
    fcntl.fcntl(descriptor, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW)
    return descriptor


class _File(NamedTuple):
    """A file that another process has open."""

    process: int
    descriptor: int
    device: int
    inode: int
    length: int

    @classmethod
    def of(cls, descriptor: int, length: int) -> _File:
        """Describe one of this process."""
        status = os.fstat(descriptor)
        return cls(os.getpid(), descriptor, status.st_dev, status.st_ino, length)

    def open(self) -> int:
        """Return a descriptor of our own.

        Raises:
            OSError: there is no such file, or another one: the number of a process or of its
                descriptor may have gone to somebody else.
        """
        # Look before opening: to open a device or a pipe can have effects, or wait.
        seen = os.open(f"/proc/{self.process}/fd/{self.descriptor}", os.O_PATH)
        try:
            status = os.fstat(seen)
            if (status.st_dev, status.st_ino) != (self.device, self.inode):
                raise FileNotFoundError(f"descriptor {self.descriptor} of {self.process}")
            return os.open(f"/proc/self/fd/{seen}", os.O_RDWR)
        finally:
            os.close(seen)


def _map_of(file: _File) -> mmap.mmap | None:
    """Map a file of another process; None where that does not work."""
    try:
        descriptor = file.open()
        try:
            return mmap.mmap(descriptor, file.length)
        finally:
            os.close(descriptor)
    except (OSError, ValueError):
        return None
