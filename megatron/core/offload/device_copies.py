"""Copies between host memory and the device that are made while others compute.

On an accelerator a stream of its own makes them, from pinned memory (**not run on one**); where the
device is the host, a thread does, so that the same program runs there.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import AbstractContextManager, contextmanager
from typing import Protocol

import torch
from torch import Tensor

from megatron.core.foundation.device import (
    current_stream,
    is_host_memory,
    set_current_stream,
    wait_on_host,
)


class Copy(Protocol):
    """A copy in flight; a `transport.work.Handle`."""

    @property
    def target(self) -> Tensor:
        """Where the values will be; void before `wait`."""
        ...

    def is_completed(self) -> bool:
        """Return whether `wait` would return at once."""
        ...

    def wait(self) -> Tensor:
        """Return the target when it has the values; on an accelerator only the stream waits."""
        ...


class DeviceCopies(Protocol):
    """Makes copies in the order in which they are started; for each direction there is one."""

    def start(self, source: Tensor, target: Tensor | None = None) -> Copy:
        """Start to copy `source` [n].

        Args:
            target: [n], of the same dtype, on the other side: host memory or the device's. None is
                new memory of the device.
        """
        ...

    def after(self, copies: Sequence[Copy]) -> AbstractContextManager[None]:
        """Inside, start what reads copies. It waits for them; what computes afterwards does not."""
        ...


def device_copies(device: torch.device, *, to_host: bool = False) -> DeviceCopies:
    """Return what copies from the host to a device, or from it to the host."""
    return ThreadCopies() if is_host_memory(device) else StreamCopies(device, to_host=to_host)


class ThreadCopies:
    """Copies that a thread makes; torch lets go of the interpreter while it copies."""

    def __init__(self) -> None:
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="offload-copies")

    def start(self, source: Tensor, target: Tensor | None = None) -> Copy:
        """See `DeviceCopies`."""
        target = torch.empty_like(source) if target is None else target
        return _ThreadCopy(target, self._thread.submit(self.carry, target, source))

    def carry(self, target: Tensor, source: Tensor) -> None:
        """Copy, in the thread."""
        target.copy_(source)

    @contextmanager
    def after(self, copies: Sequence[Copy]) -> Iterator[None]:
        """See `DeviceCopies`; there is no queue that could wait, so the caller does."""
        for copy in copies:
            copy.wait()
        yield


class _ThreadCopy:
    def __init__(self, target: Tensor, work: Future[None]) -> None:
        self.target, self._work = target, work

    def is_completed(self) -> bool:
        return self._work.done()

    def wait(self) -> Tensor:
        self._work.result()
        return self.target


class StreamCopies:
    """Copies on a stream of their own, from memory that is pinned."""

    def __init__(self, device: torch.device, *, to_host: bool = False) -> None:
        self._device, self._to_host = device, to_host
        self._stream = torch.Stream(device)
        self._readers = torch.Stream(device)

    def start(self, source: Tensor, target: Tensor | None = None) -> Copy:
        """See `DeviceCopies`."""
        if target is not None:
            # One of the two is the device's: what was queued there writes the source, or reads
            # what the target has had.
            computing = current_stream()
            assert computing is not None
            self._stream.wait_event(computing.record_event())
        with queued_on(self._stream):
            if target is None:
                target = torch.empty_like(source, device=self._device)
            target.copy_(source, non_blocking=True)
            return _StreamCopy(source, target, self._stream.record_event(), self._to_host)

    @contextmanager
    def after(self, copies: Sequence[Copy]) -> Iterator[None]:
        """See `DeviceCopies`; what is started inside also waits for what was queued before."""
        computing = current_stream()
        assert computing is not None
        queued = computing.record_event()
        with queued_on(self._readers):
            self._readers.wait_event(queued)
            for copy in copies:
                copy.wait()
            yield


class _StreamCopy:
    def __init__(self, source: Tensor, target: Tensor, copied: torch.Event, to_host: bool) -> None:
        self._source: Tensor | None = source  # lives until somebody has waited
        self.target, self._copied, self._to_host = target, copied, to_host

    def is_completed(self) -> bool:
        return False  # a stream that waits costs nothing, an event that is asked costs a call

    def wait(self) -> Tensor:
        if self._to_host:  # which computes without a stream
            wait_on_host(self._copied)
        else:
            reader = current_stream()
            assert reader is not None
            reader.wait_event(self._copied)
            self.target.record_stream(reader)
        self._source = None
        return self.target


@contextmanager
def queued_on(stream: torch.Stream) -> Iterator[None]:
    """Let this thread queue its work on a stream inside."""
    computing = current_stream()
    set_current_stream(stream)
    try:
        yield
    finally:
        set_current_stream(computing)
