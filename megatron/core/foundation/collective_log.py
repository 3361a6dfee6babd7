"""When each collective and message of this process began and was complete, while a profile runs.

The profiler of torch sees calls, but not which call of one rank belongs to which of another: here
each has the group, the tag and the number of the operation on it, which are the same on all ranks.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from megatron.core.foundation.flight_recorder import Channel

_BLOCK_ALWAYS = ("all_gather_object", "broadcast_object", "gather_object", "scatter_object")
"""Operations for whose result the host waits on every device."""


@dataclass
class _Operation:
    name: str
    channel: int
    number: int
    num_elements: int
    start_ns: int
    end_ns: int | None = None


class CollectiveLog:
    """The operations since it was made.

    Args:
        channels: number -> group and tag; more may come while it is written.
        host_waits: whether the host waits for collectives, as on CPUs. Where a stream waits, only
            operations on Python objects have an end.
    """

    def __init__(self, channels: Mapping[int, Channel], *, host_waits: bool) -> None:
        self._channels = channels
        self._host_waits = host_waits
        self._operations: dict[int, _Operation] = {}
        self._waits_in = 0

    def enter(self, record: int, name: str, channel: int, number: int, num_elements: int) -> None:
        """Note that an operation begins.

        Args:
            number: how many operations there have been on the channel.
        """
        self._operations[record] = _Operation(
            name, channel, number, num_elements, start_ns=time.time_ns()
        )

    def wait_in(self, record: int) -> None:
        """Note that the training thread blocks in an operation; 0: not any more."""
        if record == 0 and (done := self._operations.get(self._waits_in)) is not None:
            done.end_ns = time.time_ns()
        self._waits_in = record

    def started(self, record: int, result: object) -> None:
        """Note what the call of an operation returned: work in flight ends at its `wait`."""
        is_completed = getattr(result, "is_completed", None)
        if is_completed is not None and not is_completed() and record in self._operations:
            self._operations[record].end_ns = None

    def entries(self) -> list[dict[str, Any]]:
        """Return the operations that are complete, for JSON: times in ns since 1970."""
        return [
            {
                "operation": each.name,
                "group": self._channels[each.channel].name,
                "ranks": list(self._channels[each.channel].ranks),
                "tag": self._channels[each.channel].tag,
                "number": each.number,
                "num_elements": each.num_elements,
                "start_ns": each.start_ns,
                "end_ns": each.end_ns,
            }
            for each in self._operations.values()
            if each.end_ns is not None and (self._host_waits or each.name in _BLOCK_ALWAYS)
        ]
