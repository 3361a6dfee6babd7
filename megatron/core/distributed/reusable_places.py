"""Memory for buckets of gradients that exist for a short time, one after another."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

import torch
from torch import Tensor

from megatron.core.peer_memory import ReadableMemory, whole_pages


class ReusablePlaces:
    """Places that the other ranks of this machine can read, handed out and taken back.

    There are more places than buckets, but the same few serve all: the first free one of the right
    length is taken, and memory that was never touched does not exist.
    """

    def __init__(self, lengths: Sequence[int], dtype: torch.dtype, num_in_flight: int) -> None:
        """
        Args:
            lengths: elements of each bucket.
            num_in_flight: buckets that may be in reduction when the next backward pass fills
                places for all.
        """
        counts = {length: count + num_in_flight for length, count in Counter(lengths).items()}
        begin = sum(whole_pages(n * dtype.itemsize) * count for n, count in counts.items())
        self.memory = ReadableMemory(begin, num_words=len(lengths))
        self._free: dict[int, list[Tensor]] = {}
        """By length; the next one last."""
        for length, count in counts.items():
            for _ in range(count):
                begin -= whole_pages(length * dtype.itemsize)
                place = self.memory.tensor(dtype, begin, length)
                self._free.setdefault(length, []).append(place)
        self._used: dict[int, Tensor] = {}
        """Free places that have memory, by address."""

    def take(self, length: int) -> Tensor:
        """Return a place of `length` elements, with any values in it."""
        place = self._free[length].pop()
        self._used.pop(place.data_ptr(), None)
        return place

    def give_back(self, place: Tensor) -> None:
        """Let a place that was taken serve another bucket."""
        self._free[place.numel()].append(place)
        self._used[place.data_ptr()] = place

    def discard(self) -> None:
        """Give the memory of free places back to the system."""
        for place in self._used.values():
            self.memory.discard(place)
        self._used.clear()
