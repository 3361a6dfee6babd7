"""Tensors of the device that wait in host memory, or in a file, until they are read again.

On an accelerator two streams of their own copy there and back, through pinned memory (**not run on
one**); where the device is the host, a thread does, so that the same program runs there.
"""

from __future__ import annotations

import functools
import weakref
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Protocol

import torch
from torch import Tensor

from megatron.core.foundation.device import current_stream, is_host_memory, wait_on_host
from megatron.core.offload import device_copies
from megatron.core.offload.tensor_file import TensorFile


class ParkedTensor(Protocol):
    """A tensor whose memory on the device is free as soon as it was copied."""

    def fetch(self) -> None:
        """Start to copy it back, if nobody has."""
        ...

    def take(self) -> Tensor:
        """Return it when it has its values; the copy is given away, and another call fetches
        again. On an accelerator only the stream waits."""
        ...


class HostParked(ParkedTensor, Protocol):
    """One in host memory, from which it can go on to a file."""

    def unload(self) -> Tensor:
        """Return what it keeps in host memory, when it is there, and keep it no longer."""
        ...

    def load(self, host: Tensor) -> None:
        """Keep in host memory again what `unload` has returned."""
        ...


class Parking(Protocol):
    """Where tensors of one device are parked."""

    def park(self, tensor: Tensor) -> ParkedTensor:
        """Start to copy a tensor of any shape [...] to the host. Nobody writes to it any more."""
        ...


@functools.cache
def parking(device: torch.device, directory: str | None = None) -> Parking:
    """Return the one of a device: its streams, or its thread, serve all models of the process.

    Args:
        directory: on a disk, where tensors wait in a file; None is host memory.
    Raises:
        ConfigError: the directory is missing or not writable.
    """
    to_host = _host_parking(device)
    if directory is None:
        return to_host
    return FileParking(to_host, TensorFile(directory, flag="--activation-offload-path"))


@functools.cache
def _host_parking(device: torch.device) -> HostParking:
    return ThreadParking() if is_host_memory(device) else StreamParking(device)


class HostParking(Protocol):
    """Where tensors of one device are parked in host memory."""

    def park(self, tensor: Tensor) -> HostParked:
        """See `Parking`."""
        ...


class ThreadParking:
    """Copies that a thread makes, in the order in which they are asked for."""

    def __init__(self) -> None:
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="parked-tensors")

    def park(self, tensor: Tensor) -> HostParked:
        """See `Parking`."""
        return _ThreadParked(tensor.detach(), self._thread)


class _ThreadParked:
    def __init__(self, tensor: Tensor, thread: ThreadPoolExecutor) -> None:
        self._host: Tensor | None = torch.empty_like(tensor)
        self._thread = thread
        self._parked: Future[Tensor] | None = thread.submit(self._host.copy_, tensor)
        self._fetched: Future[Tensor] | None = None

    def fetch(self) -> None:
        if self._fetched is None:
            assert self._host is not None
            returned = torch.empty_like(self._host)
            self._fetched = self._thread.submit(returned.copy_, self._host)

    def take(self) -> Tensor:
        self.fetch()
        assert self._fetched is not None
        returned = self._fetched.result()
        self._fetched = None
        return returned

    def unload(self) -> Tensor:
        if self._parked is not None:
            self._parked.result()
        assert self._host is not None
        host, self._host, self._parked = self._host, None, None
        return host

    def load(self, host: Tensor) -> None:
        self._host = host


class StreamParking:
    """Copies on two streams, one for each direction."""

    def __init__(self, device: torch.device) -> None:
        self._to_host, self._to_device = torch.Stream(device), torch.Stream(device)

    def park(self, tensor: Tensor) -> HostParked:
        """See `Parking`."""
        return _StreamParked(tensor.detach(), self._to_host, self._to_device)


class _StreamParked:
    def __init__(self, tensor: Tensor, to_host: torch.Stream, to_device: torch.Stream) -> None:
        computing = current_stream()
        assert computing is not None
        self._device, self._to_device = tensor.device, to_device
        self._host: Tensor | None = torch.empty_like(tensor, device="cpu", pin_memory=True)
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
        assert self._host is not None
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

    def unload(self) -> Tensor:
        wait_on_host(self._parked)
        assert self._host is not None
        host, self._host = self._host, None
        return host

    def load(self, host: Tensor) -> None:
        self._host = host


class FileParking:
    """Copies from host memory further to a file, and back through it.

    One thread writes and one reads. What is not written yet takes at most `MAX_UNWRITTEN_BYTES` of
    host memory, but for one tensor: `park` waits for a disk that is slower.
    """

    def __init__(self, to_host: HostParking, file: TensorFile) -> None:
        self._to_host, self._file = to_host, file

    def park(self, tensor: Tensor) -> ParkedTensor:
        """See `Parking`.

        Raises:
            ConfigError: the disk is too full.
        """
        return _FileParked(self._to_host.park(tensor), tensor, self._file)


class _FileParked:
    def __init__(self, inner: HostParked, tensor: Tensor, file: TensorFile) -> None:
        self._inner, self._file = inner, file
        # Strides of a copy: those of memory without gaps.
        self._form = torch.empty_like(tensor, device="meta")
        self._is_pinned = not is_host_memory(tensor.device)
        self._place = file.take(self._form.nbytes)
        weakref.finalize(self, file.give_back, self._place, self._form.nbytes)
        self._written = file.write(self._place, self._form.nbytes, inner.unload)
        self._fetched: Future[None] | None = None

    def fetch(self) -> None:
        if self._fetched is None:
            self._fetched = self._file.reader.submit(self._read)

    def _read(self) -> None:
        self._written.result()
        form = self._form
        host = torch.empty_strided(
            form.shape, form.stride(), dtype=form.dtype, pin_memory=self._is_pinned
        )
        self._file.read(self._place, host)
        self._inner.load(host)
        self._inner.fetch()

    def take(self) -> Tensor:
        self.fetch()
        assert self._fetched is not None
        self._fetched.result()
        self._fetched = None
        returned = self._inner.take()
        self._inner.unload()
        return returned
