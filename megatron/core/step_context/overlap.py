"""Overlap the forward of one micro batch with the backward of another, on one rank.

`overlap_forward_backward(first, second)` runs each on a thread of its own, but only one at a time.
Where one has started a collective and would now wait for it, it calls `yield_to_peer`, and resumes
when the other yields or ends. Which of them runs is decided by these calls alone, never by the
clock: ranks that run the same two computations start their collectives in the same order.

Layers know nothing of it: the calls are in the collectives. What a module keeps in a variable (the
scope of random draws, for example) is saved while the other half runs, for variables registered
with `register_thread_local`.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from megatron.core import device

_THREAD_LOCALS: list[tuple[Callable[[], Any], Callable[[Any], None]]] = []
_overlap: _Overlap | None = None
_second_thread: ThreadPoolExecutor | None = None


def register_thread_local(get: Callable[[], Any], put: Callable[[Any], None]) -> None:
    """Give each half a value of its own, which `get` returns and `put` sets."""
    _THREAD_LOCALS.append((get, put))


def yield_to_peer() -> None:
    """Let the other half run, if there is one that has not ended; resume when it yields."""
    if _overlap is not None:
        _overlap.yield_()


def overlap_forward_backward(first: Callable[[], None], second: Callable[[], None]) -> None:
    """Run both to their ends; `first` begins, on this thread.

    If one raises, the other is stopped where it yields next, and the error is raised here.
    Inside either, a further call runs one after the other.
    """
    global _overlap, _second_thread
    if _overlap is not None:
        first()
        second()
        return
    if _second_thread is None:
        _second_thread = ThreadPoolExecutor(1, thread_name_prefix="overlap")
    overlap = _overlap = _Overlap()
    try:
        stream = device.current_stream()
        running = _second_thread.submit(overlap.run_half, 1, second, stream)
        overlap.run_half(0, first)
        running.result()
    finally:
        _overlap = None
    if overlap.error is not None:
        raise overlap.error


class _PeerFailed(BaseException):
    """The other half has failed. Not an `Exception`, so that no handler of the half catches it."""


class _Overlap:
    """Which of the two halves runs."""

    def __init__(self) -> None:
        self._may_go = (threading.Semaphore(0), threading.Semaphore(0))
        self._has_ended = [False, False]
        self._active = 0
        now = [get() for get, _ in _THREAD_LOCALS]
        self._saved = [now, now]
        self.error: BaseException | None = None

    def run_half(self, me: int, function: Callable[[], None], stream: Any = None) -> None:
        """Run one of the two to its end."""
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
            # The second always switches back: the values at the end are those of the first.
            if me == 1 or not self._has_ended[1]:
                self._switch(me)

    def yield_(self) -> None:
        """Let the other half run, and wait until it yields."""
        me = self._active
        if self._has_ended[1 - me]:
            return
        self._switch(me)
        self._may_go[me].acquire()
        if self.error is not None:
            raise _PeerFailed

    def _switch(self, me: int) -> None:
        other = 1 - me
        self._saved[me] = [get() for get, _ in _THREAD_LOCALS]
        for (_, put), value in zip(_THREAD_LOCALS, self._saved[other], strict=True):
            put(value)
        self._active = other
        self._may_go[other].release()
