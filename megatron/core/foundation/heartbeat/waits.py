"""For how long the training thread has waited, and for what: sums that only grow.

Two reads of a clock at each wait are all it costs. A caller takes a copy before and after what it
wants to know the waits of. The clock is the host's: where the stream of an accelerator waits and
the host goes on, nothing is counted.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import NamedTuple


class Channel(NamedTuple):
    """What is waited for on it: operations of one group and tag."""

    name: str
    """Of the group."""
    ranks: tuple[int, ...]
    """Of the group, among all processes."""
    tag: int
    """Negative for messages between two ranks."""


DATA, PEERS = -1, -2
"""In place of the number of a channel: the loader; another rank outside of any operation."""


class Waits:
    """Seconds by what was waited for."""

    def __init__(self) -> None:
        self.channels: dict[int, Channel] = {}
        self.seconds: dict[int, float] = {DATA: 0.0, PEERS: 0.0}
        """By number of the channel, or DATA, or PEERS."""
        self.loading_cpu_s = 0.0
        """Processor seconds of the training thread in its loader."""
        self.activity_s: dict[str, float] = {}
        """Seconds by what the run says it does: training, evaluating, saving a checkpoint."""
        self.waits_for: int | None = None
        """What is waited for now; None: nothing."""
        self._since = 0.0
        self._activity, self._active_since = "", time.perf_counter()

    def add_channel(self, number: int, channel: Channel) -> None:
        """Make a channel known."""
        self.channels[number] = channel
        self.seconds[number] = 0.0

    def switch(self, waits_for: int | None) -> None:
        """Note what is waited for from now on; None: nothing."""
        now = time.perf_counter()
        if self.waits_for is not None:
            self.seconds[self.waits_for] += now - self._since
        self.waits_for, self._since = waits_for, now

    @contextmanager
    def loading(self) -> Iterator[None]:
        """Count the block as waiting for data."""
        began = time.thread_time()
        self.switch(DATA)
        try:
            yield
        finally:
            self.switch(None)
            self.loading_cpu_s += time.thread_time() - began

    def begin_activity(self, activity: str) -> None:
        """Note what is being done from now on."""
        self.update_activity()
        self._activity = activity

    def update_activity(self) -> None:
        """Count what is being done up to now."""
        now = time.perf_counter()
        spent = self.activity_s.get(self._activity, 0.0)
        self.activity_s[self._activity] = spent + now - self._active_since
        self._active_since = now
