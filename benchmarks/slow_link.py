"""Copies over a link of a given rate, with a record of all copies and waits."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from megatron.core.offload.device_copies import Copy, ThreadCopies


class Interval(NamedTuple):
    """A copy or a wait."""

    name: str
    begin: float
    end: float


@dataclass
class Record:
    """Copies and waits on a link, in seconds of its clock."""

    copies: list[Interval] = field(default_factory=list)
    waits: list[Interval] = field(default_factory=list)
    num_bytes: int = 0

    @property
    def waited_s(self) -> float:
        """Return the waiting time of the computation."""
        return sum(wait.end - wait.begin for wait in self.waits)

    def clear(self) -> None:
        """Delete all entries."""
        self.copies, self.waits, self.num_bytes = [], [], 0


class SlowCopies(ThreadCopies):
    """Copies by a thread that sleeps for the rest of the time that the link would take."""

    def __init__(self, name: str, rate: float, record: Record) -> None:
        """
        Args:
            rate: bytes per second.
        """
        super().__init__()
        self._name, self._rate, self._record = name, rate, record

    def carry(self, target: Tensor, source: Tensor) -> None:
        begin = time.perf_counter()
        super().carry(target, source)
        time.sleep(max(0.0, begin + source.nbytes / self._rate - time.perf_counter()))
        self._record.copies.append(Interval(self._name, begin, time.perf_counter()))

    def start(self, source: Tensor, target: Tensor | None = None) -> Copy:
        self._record.num_bytes += source.nbytes
        copy = super().start(source, target)
        return _Timed(self._name, copy, self._record, time.perf_counter)


class Clock:
    """Simulated time: only `compute` and waits advance it."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now

    def compute(self, module: nn.Module, seconds: float) -> None:
        """Make a module take `seconds` in its forward pass, and twice as long in its backward."""

        def after(_: nn.Module, _inputs: object, output: Tensor) -> Any:
            return _Computation.apply(output, self, seconds)

        module.register_forward_hook(after)


class _Computation(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, clock: Clock, seconds: float) -> Tensor:
        ctx.clock, ctx.seconds = clock, seconds
        clock.now += seconds
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        ctx.clock.now += 2 * ctx.seconds
        return *gradients, None, None


class SimulatedCopies:
    """Copies that are made at once, and complete at the simulated time of a link."""

    def __init__(self, name: str, rate: float, record: Record, clock: Clock) -> None:
        self._name, self._rate, self._record, self.clock = name, rate, record, clock
        self._is_free_at = 0.0

    def start(self, source: Tensor, target: Tensor | None = None) -> Copy:
        begin = max(self._is_free_at, self.clock.now)
        self._is_free_at = begin + source.nbytes / self._rate
        self._record.num_bytes += source.nbytes
        self._record.copies.append(Interval(self._name, begin, self._is_free_at))
        target = torch.empty_like(source) if target is None else target
        copy = _SimulatedCopy(target.copy_(source), self.clock, self._is_free_at)
        return _Timed(self._name, copy, self._record, self.clock)

    @contextmanager
    def after(self, copies: Sequence[Copy]) -> Iterator[None]:
        for copy in copies:
            copy.wait()
        yield


class _SimulatedCopy:
    def __init__(self, target: Tensor, clock: Clock, arrival: float) -> None:
        self.target, self._clock, self._arrival = target, clock, arrival

    def is_completed(self) -> bool:
        return self._clock.now >= self._arrival

    def wait(self) -> Tensor:
        self._clock.now = max(self._clock.now, self._arrival)
        return self.target


class _Timed:
    def __init__(self, name: str, copy: Copy, record: Record, now: Callable[[], float]) -> None:
        self._name, self._copy, self._record, self._now = name, copy, record, now

    @property
    def target(self) -> Tensor:
        return self._copy.target

    def is_completed(self) -> bool:
        return self._copy.is_completed()

    def wait(self) -> Tensor:
        begin = self._now()
        target = self._copy.wait()
        self._record.waits.append(Interval(self._name, begin, self._now()))
        return target
