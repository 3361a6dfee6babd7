"""Memory of one rank that the other ranks of its machine read in place.

A rank lays out gradients or parameters in a `ReadableMemory`. The others map it, so that a
reduction is an addition of what they find there and a gather is a copy: each byte moves once, and
nobody needs a buffer for what is on its way. (Loopback TCP copies it four times; slots as those of
`host_exchange`, which serve tensors that live anywhere, twice.)

    file in memory:  words, places | flat values

A word says how far this rank is with one piece of communication, and only ever grows; a place says
where the values of that piece lie now. A rank writes them and rings; another one that has to wait
sleeps until it is rung, sees that a rank has died, and gives up after the timeout of the group.
What the words mean is the user's matter.

The file has no name and needs no room in /dev/shm. Where it cannot be had the values are ordinary
memory, `peers` answers None, and the caller uses the backend of its group; so it does on processors
that may show the others a word before the values that were written ahead of it.
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

from megatron.core.host_exchange import HostExchange, all_agree, connect, is_off

_KEEPS_ORDER = platform.machine() in ("x86_64", "AMD64")
"""Whether other cores see the stores of a core in their order, without a fence."""
MAX_STEPS = 8
"""More than the values that a word takes between `begin` and the next one."""


class ReadableMemory:
    """Flat memory of this rank, zero at first, which ranks of the same machine can read."""

    def __init__(
        self, num_bytes: int, num_words: int, *, reserve: Callable[[int], int] | None = None
    ) -> None:
        """
        Args:
            num_bytes: of the values.
            num_words: pieces of communication that are told apart.
            reserve: opens a file of so many zero bytes, which then backs the values instead of
                memory: see `read_ahead` and `let_go`.
        """
        self.num_words = num_words
        self._start = whole_pages(16 * num_words)
        self._length = self._start + whole_pages(num_bytes)
        self._file = _file_in_memory(self._length) if reserve is None else reserve(self._length)
        self._memory = mmap.mmap(-1 if self._file is None else self._file, self._length)
        if self._file is not None:
            weakref.finalize(self, os.close, self._file)
        self._words = memoryview(self._memory).cast("q")
        self._address = torch.frombuffer(self._memory, dtype=torch.uint8).data_ptr()
        self._peers: weakref.WeakKeyDictionary[dist.ProcessGroup, PeerMemory | None]
        self._peers = weakref.WeakKeyDictionary()
        self._num_begun = [0] * num_words

    @property
    def is_shared(self) -> bool:
        """Whether the ranks of all groups that asked for it can read it."""
        return bool(self._peers) and None not in self._peers.values()

    @property
    def has_file(self) -> bool:
        """Whether the values lie in a file, in memory or on a disk, that others can open."""
        return self._file is not None

    def open_file(self) -> int:
        """Return another descriptor of the file, to be closed by the caller."""
        assert self._file is not None
        return os.dup(self._file)

    def offset_of(self, begin: int) -> int:
        """Return where byte `begin` of the values lies in the file."""
        return self._start + begin

    def tensor(self, dtype: torch.dtype, begin: int, numel: int) -> Tensor:
        """Return [numel] values from byte `begin` on."""
        return torch.frombuffer(self._memory, dtype=dtype, count=numel, offset=self._start + begin)

    def begin(self, index: int) -> int:
        """Return what the word is above of from now on: all ranks begin in the same order."""
        self._num_begun[index] += 1
        return self._num_begun[index] * MAX_STEPS

    def announce(self, index: int, value: int, shown: Tensor | None = None) -> None:
        """Let the others know that this rank has come to `value`, and what they may read now.

        Args:
            index: the piece of communication.
            shown: contiguous values of this memory; None if the others know where they are.
        """
        if shown is not None:
            place = shown.data_ptr() - self._address
            assert self._start <= place <= self._length - shown.nbytes, (place, self._length)
            self._words[self.num_words + index] = place
        self._words[index] = value
        for peers in self._peers.values():
            if peers is not None:
                peers.ring()

    def settle(self) -> None:
        """Sleep until all others have come as far as this rank with everything."""
        for peers in self._peers.values():
            if peers is not None:
                for index in range(self.num_words):
                    peers.arrival(index, self._words[index]).wait()

    def read_ahead(self, values: Tensor) -> None:
        """Let the system begin to read `values` from the file."""
        self._advise(values, mmap.MADV_WILLNEED)

    def let_go(self, values: Tensor) -> None:
        """Take `values` out of this process's memory; they stay in the file."""
        self._advise(values, mmap.MADV_DONTNEED)

    def _advise(self, values: Tensor, advice: int) -> None:
        place = values.data_ptr() - self._address
        first = place - place % mmap.PAGESIZE
        self._memory.madvise(advice, first, whole_pages(place + values.nbytes - first))

    def discard(self, values: Tensor) -> None:
        """Give the memory of `values`, whole pages, back to the system (Linux): they are zero."""
        if sys.platform == "linux":
            self._advise(values, mmap.MADV_REMOVE)

    def peers(self, group: dist.ProcessGroup) -> PeerMemory | None:
        """Return the same memory of the other ranks of `group`; None where it cannot be read.

        Communication: at the first call those of `connect`, an all-gather and an all-reduce of a
        few bytes on `group`; the same answer on all ranks.
        """
        if group not in self._peers:
            self._peers[group] = self._share(group)
        return self._peers[group]

    def _share(self, group: dist.ProcessGroup) -> PeerMemory | None:
        exchange = connect(group)
        if exchange is None or not _KEEPS_ORDER:
            return None
        card = _File(0, 0, 0, 0, self._length)
        if self._file is not None:
            card = _File.of(self._file, self._length)
        mine = torch.tensor(card)
        cards = [torch.empty_like(mine) for _ in range(group.size())]
        dist.all_gather(cards, mine, group=group)
        found = {
            rank: _File(*(int(entry) for entry in entries))
            for rank, entries in enumerate(cards)
            if rank != group.rank()
        }
        others = {rank: _map_of(file) for rank, file in found.items()}
        is_mapped = self._file is not None and None not in others.values()
        if not all_agree(is_mapped, group):
            return None
        maps = {rank: memory for rank, memory in others.items() if memory is not None}
        return PeerMemory(self, exchange, maps, found)


class PeerMemory:
    """What the other ranks of a group have in their `ReadableMemory` of equal layout."""

    def __init__(
        self,
        own: ReadableMemory,
        exchange: HostExchange,
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
        self._words = {rank: memoryview(memory).cast("q") for rank, memory in maps.items()}

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

    def ring(self) -> None:
        """Wake those who wait for this rank."""
        self._exchange.ring()

    def read(self, rank: int, index: int, begin: int, like: Tensor) -> Tensor:
        """Return elements of what `rank` shows for a piece of communication; not to be written to.

        Call `forget` when they are read: until then their pages count as this process's too.

        Args:
            begin: the first element.
            like: as many elements, of this dtype.
        """
        words = self._words[rank]
        place = words[self._own.num_words + index] + begin * like.element_size()
        return torch.frombuffer(
            self._maps[rank], dtype=like.dtype, count=like.numel(), offset=place
        )

    def forget(self, rank: int, values: Tensor) -> None:
        """Take the pages of what `read` returned out of this process's memory."""
        place = values.data_ptr() - self._addresses[rank]
        first = place - place % mmap.PAGESIZE
        self._maps[rank].madvise(
            mmap.MADV_DONTNEED, first, whole_pages(place + values.nbytes - first)
        )

    def arrival(self, index: int, value: int) -> Arrival:
        """Return a handle for "all others have come to `value`"."""
        return Arrival(self, index, value)

    def late(self, index: int, value: int) -> list[int]:
        """Return the ranks whose word is below `value`."""
        return [rank for rank in self._maps if not self._has_come(rank, index, value)]

    def await_word(self, index: int, value: int) -> None:
        """Sleep until all others have come to `value`."""
        for rank in self.late(index, value):
            self._exchange.sleep_until(rank, partial(self._has_come, rank, index, value))

    def _has_come(self, rank: int, index: int, value: int) -> bool:
        return self._words[rank][index] >= value


class Arrival:
    """A handle as those of torch.distributed."""

    def __init__(self, peers: PeerMemory, index: int, value: int) -> None:
        self._peers, self._index, self._value = peers, index, value

    def is_completed(self) -> bool:
        """Return whether all others have come."""
        return not self._peers.late(self._index, self._value)

    def wait(self) -> None:
        """Sleep until they have."""
        self._peers.await_word(self._index, self._value)


def whole_pages(num_bytes: int) -> int:
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
