"""Overlap the forward of one micro batch with the backward of another, on one rank.

`overlap_forward_backward(first, second)` runs each on a thread of its own, but only one at a time.
When one has started a collective and would wait for it, it calls `yield_to_peer`, and resumes when
the other yields or ends. Only these calls decide which of them runs, never the clock: ranks with
the same two computations start their collectives in the same order.

Layers do not take part: the calls are in the collectives. Each half has a step context of its own,
which is current while the half runs. Afterwards the context of the first half is current.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import torch

from megatron.core.foundation import device
from megatron.core.step_context.context import current_step, switch_to


def yield_to_peer() -> None:
    """Resume the other half, unless it has ended; return when it yields."""
    yield_now = current_step().yield_to_peer
    if yield_now is not None:
        yield_now()


def overlap_forward_backward(first: Callable[[], None], second: Callable[[], None]) -> None:
    """Run both functions to their ends; `first` begins, on this thread.

    If one raises, the other is stopped at its next yield, and the error is raised here. A nested
    call runs its two functions one after the other.
    """
    if current_step().yield_to_peer is not None:
        first()
        second()
        return
    overlap = Overlap()
    try:
        stream = device.current_stream()
        running = _second_thread().submit(overlap.run_half, 1, second, stream)
        overlap.run_half(0, first)
        running.result()
    finally:
        current_step().yield_to_peer = None
    if overlap.error is not None:
        raise overlap.error


@functools.cache
def _second_thread() -> ThreadPoolExecutor:
    return ThreadPoolExecutor(1, thread_name_prefix="overlap")


class _PeerFailed(BaseException):
    """The other half has failed. Not an `Exception`, so that no handler of the half catches it."""


class Overlap:
    """Switches between the two halves."""

    def __init__(self) -> None:
        self._may_go = (threading.Semaphore(0), threading.Semaphore(0))
        self._has_ended = [False, False]
        self._active = 0
        first = current_step()
        first.yield_to_peer = self.yield_
        self._contexts = (first, replace(first))
        self.error: BaseException | None = None

    def run_half(
        self, me: int, function: Callable[[], None], stream: torch.Stream | None = None
    ) -> None:
        """Run one of the two halves to its end."""
        if me == 1:
            self._may_go[1].acquire()
            device.set_current_stream(stream)
        try:
            if self.error is None:
                function()
        except _PeerFailed:
            pass
        except BaseException as error:
            self.error = error
        finally:
            self._has_ended[me] = True
            # The second always switches back: at the end the first half's context is current.
            if me == 1 or not self._has_ended[1]:
                self._switch(me)

    def yield_(self) -> None:
        """Resume the other half, and wait until it yields."""
        me = self._active
        if self._has_ended[1 - me]:
            return
        self._switch(me)
        self._may_go[me].acquire()
        if self.error is not None:
            raise _PeerFailed

    def _switch(self, me: int) -> None:
        peer = 1 - me
        switch_to(self._contexts[peer])
        self._active = peer
        self._may_go[peer].release()
