"""Flat values of one rank that are reduced or gathered bucket by bucket."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from megatron.core.foundation.device import maps_pages
from megatron.core.transport.shm.bucket_allocator import BucketAllocator
from megatron.core.transport.shm.shared_buffer import SharedBuffer
from megatron.core.transport.shm.shm_bucket_transport import BucketSlot


class CommBuffer:
    """Memory that a bucket transport can use best: on a CPU, other ranks read it in place."""

    def __init__(self, values: Tensor, memory: SharedBuffer | None) -> None:
        self.values = values
        """[n], zero at first."""
        self.memory = memory

    @staticmethod
    def zeros(
        numel: int, dtype: torch.dtype, device: torch.device, *, num_buckets: int, num_ranks: int
    ) -> CommBuffer:
        """Return a buffer of `numel` zeros, with a slot for each bucket.

        Args:
            num_ranks: that have copies or shards of it.
        """
        if not maps_pages(device) or num_ranks == 1:
            return CommBuffer(torch.zeros(numel, dtype=dtype, device=device), None)
        memory = SharedBuffer(numel * dtype.itemsize, num_buckets)
        return CommBuffer(memory.tensor(dtype, 0, numel), memory)

    @staticmethod
    def in_file(
        numel: int, dtype: torch.dtype, *, num_buckets: int, reserve: Callable[[int], int]
    ) -> CommBuffer:
        """Return a buffer in a file that `reserve` opens for a number of zero bytes.

        Raises:
            ConfigError: from `reserve`.
        """
        memory = SharedBuffer(numel * dtype.itemsize, num_buckets, reserve=reserve)
        return CommBuffer(memory.tensor(dtype, 0, numel), memory)

    @property
    def is_read_in_place(self) -> bool:
        """Whether the ranks of all groups that asked for it read it where it is."""
        return self.memory is not None and self.memory.is_shared

    def slot(self, number: int, *, keeps_pages: bool = False) -> BucketSlot | None:
        """Return where the others find a bucket; None where they receive messages.

        Args:
            keeps_pages: what was read of others stays mapped.
        """
        return None if self.memory is None else BucketSlot(self.memory, number, keeps_pages)

    def wait_for_readers(self) -> None:
        """Wait until no rank reads the values any more."""
        if self.memory is not None:
            self.memory.wait_for_readers()

    def prefetch(self, values: Tensor) -> None:
        """Start to read `values` [k], a part of this buffer, from its file."""
        if self.memory is not None:
            self.memory.prefetch(values)

    def page_out(self, values: Tensor) -> None:
        """Leave `values` [k], a part of this buffer, to its file."""
        if self.memory is not None:
            self.memory.page_out(values)


class BucketPool:
    """Memory for buckets that exist for a short time, one after another."""

    def __init__(
        self, lengths: Sequence[int], dtype: torch.dtype, device: torch.device, num_in_flight: int
    ) -> None:
        """
        Args:
            lengths: elements of each bucket.
            num_in_flight: buckets in reduction when the next backward pass fills buckets.
        """
        self._dtype, self._device = dtype, device
        self._allocator = None
        if maps_pages(device):
            self._allocator = BucketAllocator(lengths, dtype, num_in_flight)

    @property
    def is_unused(self) -> bool:
        """Whether no bucket has memory."""
        return self._allocator is None or self._allocator.is_unused

    def allocate(self, length: int) -> Tensor:
        """Return a bucket [length], with any values in it."""
        if self._allocator is not None:
            return self._allocator.allocate(length)
        return torch.empty(length, dtype=self._dtype, device=self._device)

    def free(self, bucket: Tensor) -> None:
        """Let the memory of `bucket` [length] serve another one."""
        if self._allocator is not None:
            self._allocator.free(bucket)

    def slot(self, number: int, *, keeps_pages: bool) -> BucketSlot | None:
        """See `CommBuffer`."""
        if self._allocator is None:
            return None
        return BucketSlot(self._allocator.memory, number, keeps_pages)

    def trim(self) -> None:
        """Return memory that waits for buckets to the system."""
        if self._allocator is not None:
            self._allocator.discard()


__all__ = ["BucketPool", "BucketSlot", "CommBuffer"]
