"""Bytes in columns that are visited chunk by chunk.

A store holds several columns of equally many blocks. Who uses it sweeps over all chunks in order
and changes the bytes in place; where they are, and how they move, only the store knows.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Protocol

import torch
from torch import Tensor


def chunk_ranges(num_blocks: int, chunk_blocks: int) -> list[tuple[int, int]]:
    """Cut [0, num_blocks) into chunks of at most `chunk_blocks`."""
    return [
        (begin, min(begin + chunk_blocks, num_blocks))
        for begin in range(0, num_blocks, chunk_blocks)
    ]


class StateStore(Protocol):
    """Where columns live."""

    @property
    def chunks(self) -> list[tuple[int, int]]:
        """[begin, end) of each chunk, in blocks."""
        ...

    @property
    def device(self) -> torch.device:
        """Where a chunk can be computed on."""
        ...

    def sweep(self) -> Iterator[tuple[int, list[Tensor]]]:
        """Yield (number of the chunk, its part of each column), uint8 [blocks, block_bytes].

        Changes in place are kept. A part is void when the next one is asked for.
        """
        ...

    def column(self, number: int) -> Tensor:
        """Return a column, uint8 [num_blocks, block_bytes]; changes in place are kept."""
        ...

    def close(self) -> None:
        """Give everything back."""
        ...


class HostStateStore:
    """Columns in memory: of the device, or of the host for a device that is not."""

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
            is_pinned: host memory that a device can copy from and to by itself.
        """
        self.device = device
        self.chunks = chunk_ranges(num_blocks, chunk_blocks)
        self._columns = [
            torch.zeros(num_blocks, size, dtype=torch.uint8, device=device, pin_memory=is_pinned)
            for size in block_bytes
        ]

    def sweep(self) -> Iterator[tuple[int, list[Tensor]]]:
        """See `StateStore.sweep`; nothing is copied."""
        for number, (begin, end) in enumerate(self.chunks):
            yield number, [column[begin:end] for column in self._columns]

    def column(self, number: int) -> Tensor:
        """See `StateStore.column`."""
        return self._columns[number]

    def close(self) -> None:
        """See `StateStore.close`."""
        self._columns = []
