"""Graphs of an accelerator: operations that are recorded once and started together afterwards."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, TypeAlias

import torch
from torch import Tensor

from megatron.core.foundation import device

Outputs: TypeAlias = tuple[Tensor | None, ...]


class MemoryPool:
    """Memory of graphs that are replayed in the order of their captures."""

    def __init__(self) -> None:
        self.identifier: Any = None
        """Pool of the first graph, which later graphs share; None before the first capture."""


class DeviceGraph:
    """One recording. Its operations always read and write the same addresses."""

    def __init__(self, pool: MemoryPool) -> None:
        self._graph: Any = None
        self._pool = pool

    def capture(self, call: Callable[[], Outputs]) -> Outputs:
        """Record the operations that `call` starts on the device; return the replays' outputs.

        The operations are not computed yet. Code of `call` on the host runs only this once.
        """
        stream, here = _side_stream(device.current_device()), device.current_stream()
        assert here is not None, "graphs are made of the streams of an accelerator"
        stream.wait_stream(here)
        with stream:
            self._graph, recording = device.new_graph(self._pool.identifier)
            with recording:
                outputs = call()
        here.wait_stream(stream)
        self._pool.identifier = self._graph.pool()
        return outputs

    def replay(self) -> None:
        """Start the recorded operations on the current stream."""
        self._graph.replay()


@functools.cache
def _side_stream(where: torch.device) -> torch.Stream:
    """Return the stream of captures; a backward pass runs on the stream of its forward pass."""
    return torch.Stream(where)


def warm_up(call: Callable[[], object], num_times: int) -> None:
    """Run `call` on a separate stream: libraries allocate memory and choose kernels, which is
    forbidden during a capture."""
    here = device.current_stream()
    if here is None:
        for _ in range(num_times):
            call()
        return
    stream = _side_stream(device.current_device())
    stream.wait_stream(here)
    with stream:
        for _ in range(num_times):
            call()
    here.wait_stream(stream)
