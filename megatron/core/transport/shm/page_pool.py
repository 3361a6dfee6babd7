"""Tensors that have memory only at times, and pass it on to each other.

A layer's weights are gathered, used and given up, then the next layer's are: the second may have
the memory of the first. But what autograd has saved of a weight (its transpose, say) points at an
address, so a weight must come back to where it was. On Linux both hold: a tensor keeps its
address range for good, and its pages move from one range to another (mremap(2)). That
costs the moving of page table entries, where fresh pages would have to be faulted in and cleared
one by one, and blocks of malloc of changing sizes would leave holes (60 MiB of them in a
34-million-parameter GPT). On other systems, and on accelerators, whose allocator keeps freed
blocks for the next one, the storage is emptied and filled again.
"""

from __future__ import annotations

import ctypes
import functools
import mmap
import sys

import torch
from torch import Tensor

from megatron.core.foundation.device import maps_pages
from megatron.core.kernels.cpu.malloc import HUGE_PAGE_BYTES, advise_huge_pages

MAX_SPARE = 1
"""Tensors of one size whose pages wait for another one; those of more go back to the system."""

_MREMAP_FLAGS = 1 | 2 | 4
"""MAYMOVE, FIXED, DONTUNMAP: to this address, and leave an empty range (Linux 5.7)."""


class PooledTensor:
    """A flat tensor without memory until `allocate`, and again after `free`.

    From `PagePool.tensor`.
    """

    def __init__(self, pool: PagePool, tensor: Tensor, mapping: mmap.mmap | None) -> None:
        self._pool, self._mapping = pool, mapping
        self.tensor = tensor
        """[n], the same object and address for good; its values are undefined after `allocate`, and
        not to be touched after `free`."""
        self.is_allocated = mapping is None and tensor.untyped_storage().nbytes() > 0

    def allocate(self) -> None:
        """Have memory; values are undefined."""
        if self.is_allocated:
            return
        if self._mapping is None:
            self.tensor.untyped_storage().resize_(self.tensor.numel() * self.tensor.element_size())
        else:
            self._pool.take_pages(self)
        self.is_allocated = True

    def free(self) -> None:
        """Give the memory up."""
        if not self.is_allocated:
            return
        self.is_allocated = False
        if self._mapping is None:
            self.tensor.untyped_storage().resize_(0)
        else:
            self._pool.put_pages(self)

    @property
    def num_mapped_bytes(self) -> int:
        """Whole pages of the address range."""
        assert self._mapping is not None
        return len(self._mapping)

    def discard_pages(self) -> None:
        """Give the pages back to the system."""
        assert self._mapping is not None
        self._mapping.madvise(mmap.MADV_DONTNEED)

    def move_pages_from(self, peer: PooledTensor) -> bool:
        """Take the pages of another tensor of as many bytes; False where the system cannot."""
        return _move_pages(peer.tensor.data_ptr(), self.tensor.data_ptr(), self.num_mapped_bytes)


class PagePool:
    """Makes tensors that pass their memory on to each other, by equal size."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._is_mapped = maps_pages(device) and sys.platform == "linux"
        self._spare: dict[int, list[PooledTensor]] = {}
        """Empty tensors that still hold pages, by bytes."""

    def tensor(self, numel: int, dtype: torch.dtype) -> PooledTensor:
        """Return a tensor without memory."""
        num_bytes = numel * dtype.itemsize
        if not self._is_mapped or num_bytes == 0:
            tensor = torch.empty(numel, dtype=dtype, device=self.device)
            tensor.untyped_storage().resize_(0)
            return PooledTensor(self, tensor, None)
        is_large = num_bytes >= HUGE_PAGE_BYTES
        page = HUGE_PAGE_BYTES if is_large else mmap.PAGESIZE
        length = -(-num_bytes // page) * page
        mapping = mmap.mmap(-1, length, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        if is_large:
            advise_huge_pages(mapping)
        return PooledTensor(self, torch.frombuffer(mapping, dtype=dtype, count=numel), mapping)

    def take_pages(self, tensor: PooledTensor) -> None:
        """Map spare pages to a tensor, or leave it to get fresh ones at the first touch."""
        spare = self._spare.get(tensor.num_mapped_bytes, [])
        if tensor in spare:
            spare.remove(tensor)
        elif spare:
            giver = spare.pop()
            if not tensor.move_pages_from(giver):
                giver.discard_pages()

    def put_pages(self, tensor: PooledTensor) -> None:
        """Keep the pages of a tensor for the next one, or give them back if there are enough."""
        spare = self._spare.setdefault(tensor.num_mapped_bytes, [])
        if len(spare) < MAX_SPARE:
            spare.append(tensor)
        else:
            tensor.discard_pages()

    def trim(self) -> None:
        """Give all spare pages back to the system."""
        for spare in self._spare.values():
            for tensor in spare:
                tensor.discard_pages()
            spare.clear()


@functools.cache
def _libc() -> ctypes.CDLL:
    libc = ctypes.CDLL(None, use_errno=True)
    libc.mremap.restype = ctypes.c_void_p
    return libc


def _move_pages(source: int, target: int, num_bytes: int) -> bool:
    moved = _libc().mremap(
        ctypes.c_void_p(source),
        ctypes.c_size_t(num_bytes),
        ctypes.c_size_t(num_bytes),
        ctypes.c_int(_MREMAP_FLAGS),
        ctypes.c_void_p(target),
    )
    return bool(moved == target)
