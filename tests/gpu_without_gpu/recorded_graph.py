"""A stand-in for the graph of a device: a call that is run again, on static memory.

A replay runs the recorded call and puts what it returns where the capture has returned it, as a
graph does. The call reads its inputs where they were at the capture: what has not been copied there
is not seen, and what is overwritten before it is read is lost.
"""

from __future__ import annotations

import contextlib
from unittest import mock

import torch

from megatron.core.foundation import device, device_graph

GRAPHS: list[RecordedGraph] = []
"""Those of this process, in the order of their captures."""


class RecordedGraph:
    """See `DeviceGraph`."""

    def __init__(self, pool):
        self.pool, self.num_replays = pool, 0

    def capture(self, call):
        """Run the call; a device would not, so that results before the first replay are void."""
        self._call = call
        self._static = tuple(None if x is None else x.detach().clone() for x in call())
        for value in self._static:
            if value is not None:
                value.fill_(torch.nan)
        GRAPHS.append(self)
        return self._static

    def replay(self):
        """Run it again."""
        self.num_replays += 1
        with torch.no_grad():
            for target, value in zip(self._static, self._call(), strict=True):
                if target is not None:
                    target.copy_(value)


@contextlib.contextmanager
def graphs_on_cpu():
    """Let layers be captured here."""
    GRAPHS.clear()
    with (
        mock.patch.object(device, "records_graphs", return_value=True),
        mock.patch.object(device_graph, "DeviceGraph", RecordedGraph),
    ):
        yield
