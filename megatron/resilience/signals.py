"""Delay a signal to the end of the step, and give an interrupted run time for its report."""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any

from megatron.resilience.process_watch import end_by

PATIENCE_S = 5.0
"""How long an interrupted run may take to report and to stop its workers."""


def interrupt_once(number: int, _frame: FrameType | None) -> None:
    """Raise KeyboardInterrupt, and ignore further signals of this number for `PATIENCE_S`.

    People press Ctrl-C twice, and launchers repeat it. A second KeyboardInterrupt would interrupt
    the clean-up after the first one. A signal after `PATIENCE_S` ends the process.
    """
    began = time.monotonic()

    def again(number: int, _frame: FrameType | None) -> None:
        if time.monotonic() - began > PATIENCE_S:
            end_by(number)

    signal.signal(number, again)
    raise KeyboardInterrupt


@contextmanager
def interrupted_once() -> Iterator[None]:
    """In this block, replace Python's own handler of SIGINT by `interrupt_once`."""
    is_main = threading.current_thread() is threading.main_thread()
    if not is_main or signal.getsignal(signal.SIGINT) is not signal.default_int_handler:
        yield
        return
    signal.signal(signal.SIGINT, interrupt_once)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, signal.default_int_handler)


class SignalFlag:
    """A flag that signals set and the training loop reads between steps.

    The launcher forwards SIGTERM to every rank and kills the ranks that have not ended after 30 s.
    A second signal has no effect, except that a second Ctrl-C interrupts the process. `restore`
    installs the former handlers again.

    Args:
        names: signals that set the flag.
    """

    def __init__(self, *names: str) -> None:
        self.is_set = False
        numbers = {signal.Signals[name] for name in names or ("SIGTERM",)}
        self._former: dict[signal.Signals, Any] = {
            number: signal.signal(number, self._remember) for number in numbers
        }

    def _remember(self, number: int, _frame: FrameType | None) -> None:
        if self.is_set and number == signal.SIGINT:
            interrupt_once(number, _frame)
        self.is_set = True

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Make signals end the process in this block: there is nothing to save yet.

        Building and loading may take longer than launchers wait, and no Python handler runs during
        a long call into C.
        """
        for number in self._former:
            is_interrupt = number == signal.SIGINT
            signal.signal(number, interrupt_once if is_interrupt else signal.SIG_DFL)
        try:
            yield
        finally:
            for number in self._former:
                signal.signal(number, self._remember)

    def restore(self) -> None:
        """Install the former handlers again."""
        for number, former in self._former.items():
            signal.signal(number, former)
        self._former = {}
