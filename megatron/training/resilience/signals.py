"""Remember a signal until the step is over."""

from __future__ import annotations

import signal
from types import FrameType
from typing import Any


class SignalFlag:
    """Turns a signal into a flag that the loop asks between steps.

    The launcher forwards SIGTERM to every rank and kills after 30 s what has not ended; a second
    signal changes nothing. `restore` gives the signal back to its former handler.
    """

    def __init__(self, number: int = signal.SIGTERM) -> None:
        self.number = number
        self.is_set = False
        self._former: Any = signal.signal(number, self._remember)

    def _remember(self, number: int, frame: FrameType | None) -> None:
        self.is_set = True

    def restore(self) -> None:
        """Stop listening."""
        if self._former is not None:
            signal.signal(self.number, self._former)
            self._former = None
