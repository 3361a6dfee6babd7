"""Copies between host memory and the device that overlap with computation.

An accelerator copies on a separate stream, from pinned memory (**never run on an accelerator**). If
the device is the host, a thread copies, so that the same program runs there.
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
        """Receives the values; undefined before `wait`."""
        ...

    def is_completed(self) -> bool:
        """Return whether `wait` would return at once."""
        ...

    def wait(self) -> Tensor:
        """Return the target after the copy; on an accelerator only the stream waits."""
        ...


class DeviceCopies(Protocol):
    """Makes copies of one direction, in the order of their starts."""

    def start(self, source: Tensor, target: Tensor | None = None) -> Copy:
        """Start to copy `source` [n].

        Args:
            target: [n], of the same dtype, on the other side: in host memory or on the device.
                None allocates it on the device.
        """
        ...

    def after(self, copies: Sequence[Copy]) -> AbstractContextManager[None]:
        """Inside, start operations that read copies. They wait for the copies; later computation
        does not."""
        ...


def device_copies(device: torch.device, *, to_host: bool = False) -> DeviceCopies:
    """Return copies from the host to a device, or from the device to the host."""
    return ThreadCopies() if is_host_memory(device) else StreamCopies(device, to_host=to_host)


class AsyncFetch:
    """Copies of one bucket's values from host memory to the device, part by part.

    The reader of the bucket waits for them.
    """

    def __init__(self, copies: DeviceCopies) -> None:
        """
        Args:
            copies: copies to the device; several buckets may share it.
        """
        self.copies = copies
        self._pending: list[Copy] = []

    def send(self, values: Tensor, source: Tensor) -> None:
        """Start to write `source` [n], of any dtype, to `values` [n] of the device.

        The source may change afterwards.
        """
        is_pinned = not is_host_memory(values.device)
        rounded = torch.empty(source.shape, dtype=values.dtype, pin_memory=is_pinned)
        self._pending.append(self.copies.start(rounded.copy_(source), values))

    def take(self) -> list[Copy]:
        """Return the copies that have not been waited for; the caller waits."""
        pending, self._pending = self._pending, []
        return pending


class ThreadCopies:
    """Copies by a thread; torch releases the interpreter lock while it copies."""

    def __init__(self) -> None:
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="offload-copies")

    def start(self, source: Tensor, target: Tensor | None = None) -> Copy:
        """Start to copy `source` [n] in the thread."""
        target = torch.empty_like(source) if target is None else target
        return _ThreadCopy(target, self._thread.submit(self.carry, target, source))

    def carry(self, target: Tensor, source: Tensor) -> None:
        """Copy, in the thread."""
        target.copy_(source)

    @contextmanager
    def after(self, copies: Sequence[Copy]) -> Iterator[None]:
        """Block the caller, because the host has no stream that could wait."""
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
    """Copies on a separate stream, from pinned memory."""

    def __init__(self, device: torch.device, *, to_host: bool = False) -> None:
        self._device, self._to_host = device, to_host
        self._stream = torch.Stream(device)
        self._readers = torch.Stream(device)

    def start(self, source: Tensor, target: Tensor | None = None) -> Copy:
        """Start to copy `source` [n] on the stream."""
        if target is not None:
            # Queued operations of the device may write the source, or read the old target.
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
        """Queue on a stream of readers, which also waits for everything queued before."""
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
        self._source: Tensor | None = source  # kept alive until the copy is complete
        self.target, self._copied, self._to_host = target, copied, to_host

    def is_completed(self) -> bool:
        return False  # waiting on a stream is free, querying an event costs a call

    def wait(self) -> Tensor:
        if self._to_host:  # the host computes without a stream
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
    """Inside, this thread queues its work on a stream."""
    computing = current_stream()
    set_current_stream(stream)
    try:
        yield
    finally:
        set_current_stream(computing)
