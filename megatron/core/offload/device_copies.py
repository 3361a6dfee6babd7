"""Copies from host memory to the device that are made while others compute.

On an accelerator a stream of its own makes them, from pinned memory (**not run on one**); where the
device is the host, a thread does, so that the same program runs there.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Protocol

import torch
from torch import Tensor

from megatron.core.foundation.device import current_stream, is_host_memory, set_current_stream


class DeviceCopies(Protocol):
    """Makes copies in the order in which they are started."""

    def start(self, source: Tensor) -> Callable[[], Tensor]:
        """Start to copy `source` [n]; calling the result waits, and returns the copy."""
        ...


def device_copies(device: torch.device) -> DeviceCopies:
    """Return what copies from the host to a device."""
    return ThreadCopies() if is_host_memory(device) else StreamCopies(device)


class ThreadCopies:
    """Copies that a thread makes; torch lets go of the interpreter while it copies."""

    def __init__(self, copy: Callable[[Tensor, Tensor], object] = Tensor.copy_) -> None:
        """
        Args:
            copy: (target, source).
        """
        self._copy = copy
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="host-to-device")

    def start(self, source: Tensor) -> Callable[[], Tensor]:
        """See `DeviceCopies`."""
        target = torch.empty_like(source)
        work: Future[object] = self._thread.submit(self._copy, target, source)

        def wait() -> Tensor:
            work.result()
            return target

        return wait


class StreamCopies:
    """Copies on a stream of their own, from memory that is pinned."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream = torch.Stream(device)

    def start(self, source: Tensor) -> Callable[[], Tensor]:
        """See `DeviceCopies`; waiting lets the current stream wait, and the host go on."""
        computing = current_stream()
        set_current_stream(self._stream)
        try:
            target = torch.empty_like(source, device=self._device)
            target.copy_(source, non_blocking=True)
            copied = self._stream.record_event()
        finally:
            set_current_stream(computing)

        def wait() -> Tensor:
            reader = current_stream()
            assert reader is not None
            reader.wait_event(copied)
            target.record_stream(reader)
            return target

        return wait
