"""Remember a signal until the step is over."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any


class SignalFlag:
    """Turns signals into a flag that the loop asks between steps.

    The launcher forwards SIGTERM to every rank and kills after 30 s what has not ended; a second
    signal changes nothing, but for Ctrl-C, which then ends the process. `restore` gives the
    signals back to their former handlers.

    Args:
        names: signals that are remembered.
    """

    def __init__(self, *names: str) -> None:
        self.is_set = False
        numbers = {signal.Signals[name] for name in names or ("SIGTERM",)}
        self._former: dict[signal.Signals, Any] = {
            number: signal.signal(number, self._remember) for number in numbers
        }

    def _remember(self, number: int, _frame: FrameType | None) -> None:
        if self.is_set and number == signal.SIGINT:
            raise KeyboardInterrupt
        self.is_set = True

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Let a signal end the process in this block: nothing is trained yet that could be saved.

        Building and loading may take longer than launchers wait, and no handler of Python's runs
        inside a long call into C.
        """
        for number in self._former:
            is_interrupt = number == signal.SIGINT
            signal.signal(number, signal.default_int_handler if is_interrupt else signal.SIG_DFL)
        try:
            yield
        finally:
            for number in self._former:
                signal.signal(number, self._remember)

    def restore(self) -> None:
        """Stop listening."""
        for number, former in self._former.items():
            signal.signal(number, former)
        self._former = {}
