"""Values of several ranks of a machine, mapped side by side: full tensors without a copy.

Each rank owns pieces of values in its `SharedBuffer`. A joined tensor is a range of addresses in
which the pages of all ranks' pieces follow one another, so to gather a tensor is to look at it. The
machine has each value once, whatever the number of ranks.

    rank 0's memory  | a0 | b0 |        joined on every rank  | a0 | a1 |   | b0 | b1 |
    rank 1's memory  | a1 | b1 |

The pages are mapped as private ones (MAP_PRIVATE of mmap(2)): what is written to a joined tensor
goes to a copy of the page, which `free` throws away; no owner ever sees it.

Owners change their values when nobody looks. A rank's word in its memory says that its values may
be looked at, and later that it looks at nobody's any more: ranks wait for each other twice for each
change, and not for each tensor.
"""

from __future__ import annotations

import ctypes
import functools
import mmap
import os
import sys
from collections.abc import Sequence
from contextlib import suppress

import torch
import torch.distributed as dist

from megatron.core.foundation.flight_recorder import recorded
from megatron.core.topology.group import Group
from megatron.core.transport.shm.shared_buffer import PeerBuffers, SharedBuffer
from megatron.core.transport.shm.shm_collectives import all_ranks_can
from megatron.core.transport.work import Work

_MAP_FIXED = 0x10
_WORD = 0
"""The one of the memory in which a rank says how far it is."""


class MappedTensor:
    """A flat tensor whose pages belong to several ranks. From `map_gather`."""

    def __init__(self, dtype: torch.dtype, num_bytes: int) -> None:
        self._mapping = mmap.mmap(-1, num_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        self.tensor = torch.frombuffer(self._mapping, dtype=dtype)
        """[n]; not to be touched after `free`, when the owners may change the values."""
        self.is_allocated = False

    def map_piece(self, begin: int, num_bytes: int, file: int, offset: int) -> None:
        """Let bytes from `begin` on be those of a file.

        Raises:
            OSError: the system cannot.
        """
        address = self.tensor.data_ptr() + begin
        protection, flags = mmap.PROT_READ | mmap.PROT_WRITE, mmap.MAP_PRIVATE | _MAP_FIXED
        found = _libc().mmap(address, num_bytes, protection, flags, file, offset)
        if found != address:
            raise OSError(ctypes.get_errno(), "a piece of a file cannot be mapped at its place")

    def allocate(self) -> None:
        """Note that the values are looked at from now on."""
        self.is_allocated = True

    def free(self) -> None:
        """Take the pages out of this process's memory; what was written to them is lost."""
        if self.is_allocated:
            self.is_allocated = False
            self._mapping.madvise(mmap.MADV_DONTNEED)


class MappedGather:
    """Joined tensors, and when they may be looked at. From `map_gather`."""

    tag = 1 << 30
    """Of no message and no bucket: `wait_for_readers` is matched with itself alone."""

    def __init__(
        self,
        memory: SharedBuffer,
        group: Group,
        peers: PeerBuffers | None,
        tensors: list[MappedTensor],
    ) -> None:
        self.group, self._memory, self._peers = group, memory, peers
        self.tensors = tensors
        self._base = memory.begin(_WORD)
        self._is_shown = False

    def start(self) -> Work[None]:
        """Publish that the own values are in place; the work ends when those of the others are."""
        is_first, self._is_shown = not self._is_shown, True
        if self._peers is None:
            return Work.completed(None)
        if is_first:
            self._memory.publish_progress(_WORD, self._base + 1)
        return Work.of([self._peers.progress_of_others(_WORD, self._base + 1)], None)

    @recorded("barrier")
    def wait_for_readers(self) -> None:
        """Sleep until no rank looks at the values any more; this one does not from now on.

        Returns at once if nothing was gathered since the last call. All ranks gather together.
        """
        if not self._is_shown:
            return
        if self._peers is not None:
            self._memory.publish_progress(_WORD, self._base + 2)
            self._peers.wait_for_progress(_WORD, self._base + 2)
        self._base, self._is_shown = self._memory.begin(_WORD), False


def map_gather(
    memory: SharedBuffer,
    group: Group,
    dtype: torch.dtype,
    layouts: Sequence[Sequence[tuple[int, int]]],
) -> MappedGather | None:
    """Join the values that the ranks of a group have at equal places; None where that cannot be.

    Args:
        layouts: of each tensor, ranges (first byte, bytes) of whole pages: that of rank 0, then
            of rank 1, and so on; afterwards the next range.
    Communication:
        at most those of `SharedBuffer.peers` and an all-reduce of a few bytes on `group`.
    """
    peers = None
    if isinstance(group, dist.ProcessGroup) and group.size() > 1:
        peers = memory.peers(group)
        if peers is None:
            return None
    joined: list[MappedTensor] = []
    if memory.has_file and sys.platform == "linux":
        with suppress(OSError):
            files = [memory.open_file()] if peers is None else peers.open_files()
            try:
                joined = [_join(memory, files, dtype, layout) for layout in layouts]
            finally:
                for file in files:
                    os.close(file)
    is_complete = len(joined) == len(layouts)
    if isinstance(group, dist.ProcessGroup) and peers is not None:
        is_complete = all_ranks_can(is_complete, group)
    if not is_complete:
        return None
    return MappedGather(memory, group, peers, joined)


def _join(
    memory: SharedBuffer, files: list[int], dtype: torch.dtype, layout: Sequence[tuple[int, int]]
) -> MappedTensor:
    joined = MappedTensor(dtype, len(files) * sum(num_bytes for _, num_bytes in layout))
    position = 0
    for begin, num_bytes in layout:
        for file in files:
            joined.map_piece(position, num_bytes, file, memory.offset_of(begin))
            position += num_bytes
    return joined


@functools.cache
def _libc() -> ctypes.CDLL:
    libc = ctypes.CDLL(None, use_errno=True)
    libc.mmap.restype = ctypes.c_void_p
    libc.mmap.argtypes = [
        ctypes.c_void_p,
        ctypes.c_size_t,
        ctypes.c_int,
        ctypes.c_int,
        ctypes.c_int,
        ctypes.c_long,
    ]
    return libc
