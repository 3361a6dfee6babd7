"""Seconds that operations take on this machine, each by itself on tensors of the same form.

One that is called again and again finds its tensors in the core's cache. In a step it reads what
other operations have written long before: that is added, by what a byte takes to be read.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from typing import Any

import torch

from megatron_lattice.planner.tracing.work import Operation, WorkOfRank

_ENOUGH_S = 4e-3
"""What measuring an operation may take, but for its first call."""
_MAX_CALLS = 30
_BEYOND_CACHES = 2**24
"""Bytes that no core's own cache holds."""


class OperationTimes:
    """What operations were found to take.

    With as many threads as torch has in this process; the least of several calls counts.
    """

    def __init__(self) -> None:
        self._found: dict[Operation, float] = {}
        self._seconds_to_read = float("inf")

    def seconds_of_work(self, work: WorkOfRank) -> float:
        """Return the seconds of all operations of a rank, and of reading what they read."""
        return sum(
            (self.seconds(each) + each.num_bytes * self.seconds_to_read) * number
            for each, number in work.operations.items()
        )

    @property
    def seconds_to_read(self) -> float:
        """Seconds to read a byte that is not in the core's cache."""
        if not math.isfinite(self._seconds_to_read):
            self._measure_reading()
        return self._seconds_to_read

    def seconds(self, operation: Operation) -> float:
        """Return the seconds of one call.

        An operation that does not work with made-up values (lengths that must have a sum) counts
        as a copy of its tensors.
        """
        if operation not in self._found:
            self._found[operation] = _measured(operation)
        return self._found[operation]

    def measure_again(self) -> None:
        """Measure all of them once more: something else may have slowed the machine before."""
        for operation, least in self._found.items():
            self._found[operation] = min(least, _measured(operation))
        self._measure_reading()

    def _measure_reading(self) -> None:
        long = torch.ones(_BEYOND_CACHES // 4)
        seconds = _least_seconds(long.sum) / _BEYOND_CACHES
        self._seconds_to_read = min(self._seconds_to_read, seconds)


def _measured(operation: Operation) -> float:
    with torch.no_grad():
        try:
            return _least_seconds(operation.prepared())
        except (RuntimeError, ValueError, IndexError):
            return _least_seconds(operation.copies())


def _least_seconds(call: Callable[[], Any]) -> float:
    begin = time.perf_counter()
    call()
    end = time.perf_counter()
    least, until = end - begin, end + _ENOUGH_S
    for _ in range(_MAX_CALLS):
        if end > until:
            break
        begin = time.perf_counter()
        call()
        end = time.perf_counter()
        least = min(least, end - begin)
    return least
