"""Seconds that operations take on this machine, each by itself on tensors of the same form."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import torch

from megatron.planner.tracing.work import Operation, WorkOfRank

_ENOUGH_S = 4e-3
"""What measuring an operation may take, but for its first call."""
_MAX_CALLS = 30


class OperationTimes:
    """What operations were found to take.

    With as many threads as torch has in this process; the least of several calls counts.
    """

    def __init__(self) -> None:
        self._found: dict[Operation, float] = {}

    def seconds_of_work(self, work: WorkOfRank) -> float:
        """Return the seconds of all operations of a rank, one after the other."""
        return sum(self.seconds(each) * number for each, number in work.operations.items())

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
