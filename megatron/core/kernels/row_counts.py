"""Numbers of rows per group that an accelerator has computed and the host has not read."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from typing import overload

import torch
from torch import Tensor


class RowCounts(Sequence[int]):
    """How many consecutive rows each group has, counted on a device.

    A kernel reads `ends` without a wait. The first read of a number waits for the device.

    Attributes:
        counts: int64 [l].
    """

    def __init__(self, counts: Tensor) -> None:
        self.counts = counts

    @cached_property
    def ends(self) -> Tensor:
        """First row after each group, int32 [l]."""
        return self.counts.cumsum(0).to(torch.int32)

    @cached_property
    def _on_host(self) -> list[int]:
        return [int(count) for count in self.counts.tolist()]

    def __len__(self) -> int:
        """Return the number of groups."""
        return self.counts.shape[0]

    @overload
    def __getitem__(self, index: int) -> int: ...

    @overload
    def __getitem__(self, index: slice) -> list[int]: ...

    def __getitem__(self, index: int | slice) -> int | list[int]:
        """Return numbers of rows; the first call waits for the device."""
        return self._on_host[index]


def counts_on_device(counts: Sequence[int], device: torch.device) -> Tensor:
    """Return the rows of each group, int64 [l] on `device`."""
    if isinstance(counts, RowCounts):
        return counts.counts
    return torch.tensor(counts).to(device, non_blocking=True)


def ends_of_rows(counts: Sequence[int], device: torch.device) -> Tensor:
    """Return the first row after each group, int32 [l] on `device`."""
    if isinstance(counts, RowCounts):
        return counts.ends
    return counts_on_device(counts, device).cumsum(0).to(torch.int32)


def group_of_row(counts: Tensor, num_rows: int) -> Tensor:
    """Return the group of each row, int64 [n].

    Args:
        counts: int64 [l], rows of each group; further rows after the last group get the number l.
    """
    rows = torch.arange(num_rows, device=counts.device)
    return torch.searchsorted(counts.cumsum(0), rows, right=True)


def split_rows(x: Tensor, counts: Sequence[int]) -> Sequence[Tensor]:
    """Return the rows [n, ...] of each group, without the rows after the last group."""
    sizes = list(counts)
    return x[: sum(sizes)].split(sizes)


def join_rows(pieces: Sequence[Tensor], num_rows: int) -> Tensor:
    """Join rows [.., o] of all groups, and append rows of zeros up to `num_rows`."""
    joined = torch.cat(list(pieces))
    missing = num_rows - joined.shape[0]
    return torch.nn.functional.pad(joined, (0, 0, 0, missing)) if missing else joined
