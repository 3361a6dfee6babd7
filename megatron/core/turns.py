"""Two computations of one rank that take turns: while one waits for other ranks, the other works.

`run_in_turns(first, second)` runs both, each on a thread of its own, but only one at a time. Where
one of them has started an exchange and would now wait for it, it calls `let_the_other_work`, and
goes on when the other comes to such a place (or to its end). Who works when is decided by these
calls alone, never by the clock: ranks that run the same two computations start their collectives
in the same order.

Layers know nothing of it: the places are in the exchanges. What a computation has noted in a
module's variable (where random draws belong, for example) is put away while the other works, for
variables that the module has named to `keep_apart`.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from megatron.core import device

_APART: list[tuple[Callable[[], Any], Callable[[Any], None]]] = []
_turns: _Turns | None = None
_second_thread: ThreadPoolExecutor | None = None


def keep_apart(get: Callable[[], Any], put: Callable[[Any], None]) -> None:
    """Give each of two computations a value of its own, which `get` returns and `put` sets."""
    _APART.append((get, put))


def let_the_other_work() -> None:
    """Hand over to the other computation, if there is one that has not ended; then go on."""
    if _turns is not None:
        _turns.hand_over()


def run_in_turns(first: Callable[[], None], second: Callable[[], None]) -> None:
    """Run both to their ends; `first` begins, on this thread.

    If one raises, the other is stopped at its next turn, and the error is raised here.
    Inside either, a further call runs one after the other.
    """
    global _turns, _second_thread
    if _turns is not None:
        first()
        second()
        return
    if _second_thread is None:
        _second_thread = ThreadPoolExecutor(1, thread_name_prefix="turns")
    turns = _turns = _Turns()
    try:
        where = device.current_stream()
        running = _second_thread.submit(turns.take_part, 1, second, where)
        turns.take_part(0, first)
        running.result()
    finally:
        _turns = None
    if turns.error is not None:
        raise turns.error


class _Abandoned(BaseException):
    """The other computation has failed. No `Exception`: nothing may mistake it for its own."""


class _Turns:
    """Whose turn it is, of two."""

    def __init__(self) -> None:
        self._may_go = (threading.Semaphore(0), threading.Semaphore(0))
        self._has_ended = [False, False]
        self._active = 0
        now = [get() for get, _ in _APART]
        self._put_away = [now, now]
        self.error: BaseException | None = None

    def take_part(self, me: int, function: Callable[[], None], where: Any = None) -> None:
        """Run one of the two, from its first turn to its end."""
        if me == 1:
            self._may_go[1].acquire()
            device.set_current_stream(where)
        try:
            if self.error is None:
                function()
        except _Abandoned:
            pass
        except BaseException as error:
            self.error = error
        finally:
            self._has_ended[me] = True
            # The second always passes on: what is noted at the end is what the first has noted.
            if me == 1 or not self._has_ended[1]:
                self._pass_on(me)

    def hand_over(self) -> None:
        """Let the other go on, and wait for the next turn."""
        me = self._active
        if self._has_ended[1 - me]:
            return
        self._pass_on(me)
        self._may_go[me].acquire()
        if self.error is not None:
            raise _Abandoned

    def _pass_on(self, me: int) -> None:
        other = 1 - me
        self._put_away[me] = [get() for get, _ in _APART]
        for (_, put), value in zip(_APART, self._put_away[other], strict=True):
            put(value)
        self._active = other
        self._may_go[other].release()
