"""Tensors of the device that wait in host memory until they are read again.

On an accelerator two streams of their own copy there and back, through pinned memory (**not run on
one**); where the device is the host, a thread does, so that the same program runs there.
"""

from __future__ import annotations

import functools
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Protocol

import torch
from torch import Tensor

from megatron.core.foundation.device import current_stream, is_host_memory
from megatron.core.offload import device_copies


class ParkedTensor(Protocol):
    """A tensor whose memory on the device is free as soon as it was copied."""

    def fetch(self) -> None:
        """Start to copy it back, if nobody has."""
        ...

    def take(self) -> Tensor:
        """Return it when it has its values; the copy is given away, and another call fetches
        again. On an accelerator only the stream waits."""
        ...


class Parking(Protocol):
    """Where tensors of one device are parked."""

    def park(self, tensor: Tensor) -> ParkedTensor:
        """Start to copy a tensor of any shape [...] to the host. Nobody writes to it any more."""
        ...


@functools.cache
def parking(device: torch.device) -> Parking:
    """Return the one of a device: its streams, or its thread, serve all models of the process."""
    return ThreadParking() if is_host_memory(device) else StreamParking(device)


class ThreadParking:
    """Copies that a thread makes, in the order in which they are asked for."""

    def __init__(self) -> None:
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="parked-tensors")

    def park(self, tensor: Tensor) -> ParkedTensor:
        """See `Parking`."""
        return _ThreadParked(tensor.detach(), self._thread)


class _ThreadParked:
    def __init__(self, tensor: Tensor, thread: ThreadPoolExecutor) -> None:
        self._host = torch.empty_like(tensor)
        self._thread = thread
        self._parked: Future[Tensor] = thread.submit(self._host.copy_, tensor)
        self._fetched: Future[Tensor] | None = None

    def fetch(self) -> None:
        if self._fetched is None:
            returned = torch.empty_like(self._host)
            self._fetched = self._thread.submit(returned.copy_, self._host)

    def take(self) -> Tensor:
        self.fetch()
        assert self._fetched is not None
        returned = self._fetched.result()
        self._fetched = None
        return returned


class StreamParking:
    """Copies on two streams, one for each direction."""

    def __init__(self, device: torch.device) -> None:
        self._to_host, self._to_device = torch.Stream(device), torch.Stream(device)

    def park(self, tensor: Tensor) -> ParkedTensor:
        """See `Parking`."""
        return _StreamParked(tensor.detach(), self._to_host, self._to_device)


class _StreamParked:
    def __init__(self, tensor: Tensor, to_host: torch.Stream, to_device: torch.Stream) -> None:
        computing = current_stream()
        assert computing is not None
        self._device, self._to_device = tensor.device, to_device
        self._host = torch.empty_like(tensor, device="cpu", pin_memory=True)
        to_host.wait_event(computing.record_event())
        with device_copies.queued_on(to_host):
            self._host.copy_(tensor, non_blocking=True)
            self._parked = to_host.record_event()
        # Its memory is the allocator's again when that stream has read it; the host does not wait.
        tensor.record_stream(to_host)
        self._fetched: tuple[Tensor, torch.Event] | None = None

    def fetch(self) -> None:
        if self._fetched is not None:
            return
        self._to_device.wait_event(self._parked)
        with device_copies.queued_on(self._to_device):
            returned = torch.empty_like(self._host, device=self._device)
            returned.copy_(self._host, non_blocking=True)
            self._fetched = returned, self._to_device.record_event()

    def take(self) -> Tensor:
        self.fetch()
        assert self._fetched is not None
        returned, copied = self._fetched
        self._fetched = None
        reader = current_stream()
        assert reader is not None
        reader.wait_event(copied)
        returned.record_stream(reader)
        return returned
