"""Memory for buckets of gradients that exist for a short time, one after another."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from megatron.core.transport.shm.shared_buffer import SharedBuffer, round_up_to_pages


class BucketAllocator:
    """Places that the other ranks of this machine can read, handed out and taken back.

    A bucket gets the first gap that it fits into, so a few buckets' worth of pages serves all, also
    where their lengths differ. To keep these pages from step to step saves time: to touch new ones
    takes far longer than to write to them again (in a virtual machine 47 ms and 4 ms, of 64 MiB).
    """

    def __init__(self, lengths: Sequence[int], dtype: torch.dtype, num_in_flight: int) -> None:
        """
        Args:
            lengths: elements of each bucket.
            num_in_flight: buckets that may be in reduction when the next backward pass fills
                places for all.
        """
        self._dtype = dtype
        sizes = [round_up_to_pages(length * dtype.itemsize) for length in lengths]
        # There is at most one gap before each place in use. With this much one of them is always
        # wide enough; what is never touched does not exist.
        gaps = (len(sizes) + num_in_flight) * max(sizes)
        self._common = sorted(sizes)[len(sizes) // 2]
        self._kept = 2 * self._common
        """Bytes for places of common length, a layer being filled and one being reduced."""
        self.memory = SharedBuffer(
            self._kept + sum(sizes) + num_in_flight * max(sizes) + gaps, num_counters=len(lengths)
        )
        self._used: list[tuple[int, int, int]] = []
        """(first byte, end, address) of the places in use, in order."""
        self._touched = 0
        """Bytes from the start on that may have memory."""

    @property
    def is_unused(self) -> bool:
        """Whether nothing is allocated."""
        return not self._used

    def allocate(self, length: int) -> Tensor:
        """Return a place of `length` elements, with any values in it."""
        num_bytes = round_up_to_pages(length * self._dtype.itemsize)
        begin = 0 if num_bytes <= self._common else self._kept
        for first, end, _ in self._used:
            if first - begin >= num_bytes:
                break
            begin = max(begin, end)
        offset = self.memory.tensor(self._dtype, begin, length)
        self._used.append((begin, begin + num_bytes, offset.data_ptr()))
        self._used.sort()
        self._touched = max(self._touched, begin + num_bytes)
        return offset

    def free(self, offset: Tensor) -> None:
        """Let a place that was taken serve another bucket."""
        self._used = [used for used in self._used if used[2] != offset.data_ptr()]

    def discard(self) -> None:
        """Give memory of unused places back to the system, but for two of common length."""
        begin = max([self._kept, *(end for _, end, _ in self._used)])
        if begin < self._touched:
            self.memory.discard(self.memory.tensor(torch.uint8, begin, self._touched - begin))
            self._touched = begin
