"""Flat values of one rank that are reduced or gathered bucket by bucket."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from megatron.core.transport.shm.shared_buffer import SharedBuffer
from megatron.core.transport.shm.shm_bucket_transport import SharedSlot


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
        if device.type != "cpu" or num_ranks == 1:
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

    def slot(self, number: int, *, keeps_pages: bool = False) -> SharedSlot | None:
        """Return where the others find a bucket; None where they receive messages.

        Args:
            keeps_pages: what was read of others stays mapped.
        """
        return None if self.memory is None else SharedSlot(self.memory, number, keeps_pages)

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


__all__ = ["CommBuffer", "SharedSlot"]
