"""Activations of chosen modules, kept in host memory from forward to backward.

Tensors that autograd saves inside a region are copied to the host when forward has passed the
region. When backward reaches a region, it starts to copy back the tensors of the region before it,
so that the copies overlap with computation (ZeRO-Offload's idea applied to activations: S.
Rajbhandari et al., "ZeRO-Infinity", section 5.1.3, arXiv 2104.07857). No number changes.

An accelerator copies on two separate streams, through pinned memory. If the device is the host, a
thread copies, so that the same program runs there.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Protocol

import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef

from megatron.core.foundation.device import current_stream, is_host_memory
from megatron.core.offload import device_copies
from megatron.core.step_context.context import current_step, within_step


class SavedActivations:
    """The regions of one micro batch in one model chunk, in the order of forward.

    Args:
        min_numel: smaller tensors stay on the device.
    """

    def __init__(self, min_numel: int) -> None:
        self._min_numel = min_numel
        self._last: _Region | None = None
        self._known: dict[int, tuple[StorageWeakRef, dict[object, _Saved]]] = {}

    @contextmanager
    def region(self, *modules: nn.Module) -> Iterator[None]:
        """Offload the tensors that are saved inside, except for the parameters of `modules`."""
        region = self._last = _Region(self._last)
        weights: set[int] = set()

        def pack(tensor: Tensor) -> Tensor | _Saved:
            if not weights:
                # Not before: sharded parameters are gathered when their module is called.
                weights.add(0)
                owned = (p for module in modules for p in module.parameters())
                weights.update(p.untyped_storage()._cdata for p in owned)
            storage = tensor.untyped_storage()
            if tensor.numel() < self._min_numel or storage._cdata in weights or _repeats(tensor):
                return tensor
            return self._offloaded(tensor, storage, region)

        with torch.autograd.graph.saved_tensors_hooks(pack, _unpack):
            yield

    def _offloaded(self, tensor: Tensor, storage: torch.UntypedStorage, region: _Region) -> _Saved:
        """Offload a tensor once, however many operations save it."""
        known, views = self._known.get(storage._cdata, (None, {}))
        if known is None or known.expired():
            views = {}
            self._known[storage._cdata] = StorageWeakRef(storage), views
        view = tensor.storage_offset(), tensor.shape, tensor.stride(), tensor.dtype
        if view not in views:
            views[view] = _Saved(offloader(tensor.device)(tensor), region)
        views[view].num_readers += 1
        return views[view]


class _Region:
    """Tensors that backward needs at about the same time."""

    def __init__(self, previous: _Region | None) -> None:
        self.previous = previous
        self.saved: weakref.WeakSet[_Saved] = weakref.WeakSet()

    def fetch(self) -> None:
        """Start to copy back the tensors that have not been read yet."""
        for saved in self.saved:
            saved.offloaded.fetch()


class _Saved:
    """Autograd keeps this instead of a tensor, once for each operation that saved the tensor."""

    def __init__(self, offloaded: OffloadedTensor, region: _Region) -> None:
        self.offloaded, self.region = offloaded, region
        self.num_readers = 0
        self._values: Tensor | None = None
        region.saved.add(self)

    def read(self) -> Tensor:
        """Return the values; they stay on the device until the last reader has read them."""
        if self._values is None:
            self.region.fetch()
            self._values = self.offloaded.take()
            self.region.saved.discard(self)
        before = self.region.previous
        while before is not None and not before.saved:
            before = before.previous
        if before is not None:
            before.fetch()
        values = self._values
        self.num_readers -= 1
        if self.num_readers <= 0:
            self._values = None
        return values


def _unpack(saved: Tensor | _Saved) -> Tensor:
    return saved if isinstance(saved, Tensor) else saved.read()


def _repeats(tensor: Tensor) -> bool:
    """Return whether elements share memory, as in an expanded tensor."""
    return any(
        stride == 0 and size > 1 for size, stride in zip(tensor.shape, tensor.stride(), strict=True)
    )


def saving_activations(is_on: bool, min_numel: int) -> AbstractContextManager[None]:
    """Inside, one micro batch runs through one model chunk, whose regions belong together.

    Args:
        min_numel: see `SavedActivations`.
    """
    if not is_on or not torch.is_grad_enabled():
        return nullcontext()
    return within_step(offload_region=SavedActivations(min_numel).region)


def offloading(is_on: bool, *modules: nn.Module) -> AbstractContextManager[None]:
    """Offload the tensors that the computation inside saves for backward.

    No effect outside of `saving_activations`, and inside a recomputed region, whose activations are
    short-lived.

    Args:
        modules: their parameters are used inside, and stay on the device.
    """
    step = current_step()
    if not is_on or step.offload_region is None or step.is_checkpointed:
        return nullcontext()
    return step.offload_region(*modules)


class OffloadedTensor(Protocol):
    """A tensor of the device whose memory is free as soon as it has been copied to the host."""

    def fetch(self) -> None:
        """Start to copy it back, unless that has been started."""
        ...

    def take(self) -> Tensor:
        """Return the tensor [...] after the copy; the next call fetches again. On an accelerator
        only the stream waits."""
        ...


@functools.cache
def offloader(device: torch.device) -> Callable[[Tensor], OffloadedTensor]:
    """Return the function that starts to copy a tensor of the device to the host.

    All models of the process share its two streams, or its thread, which copies in the order of the
    starts. The tensor must not change any more.
    """
    if is_host_memory(device):
        thread = ThreadPoolExecutor(1, thread_name_prefix="offloaded-tensors")
        return lambda tensor: _ThreadOffloaded(tensor.detach(), thread)
    to_host, to_device = torch.Stream(device), torch.Stream(device)
    return lambda tensor: _StreamOffloaded(tensor.detach(), to_host, to_device)


class _ThreadOffloaded:
    def __init__(self, tensor: Tensor, thread: ThreadPoolExecutor) -> None:
        self._host = torch.empty_like(tensor)
        self._thread = thread
        self.copied: Future[Tensor] = thread.submit(self._host.copy_, tensor)
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


class _StreamOffloaded:
    def __init__(self, tensor: Tensor, to_host: torch.Stream, to_device: torch.Stream) -> None:
        computing = current_stream()
        assert computing is not None
        self._device, self._to_device = tensor.device, to_device
        self._host = torch.empty_like(tensor, device="cpu", pin_memory=True)
        to_host.wait_event(computing.record_event())
        with device_copies.queued_on(to_host):
            self._host.copy_(tensor, non_blocking=True)
            self._copied = to_host.record_event()
        # The allocator reuses the memory after that stream has read it; the host does not wait.
        tensor.record_stream(to_host)
        self._fetched: tuple[Tensor, torch.Event] | None = None

    def fetch(self) -> None:
        if self._fetched is not None:
            return
        self._to_device.wait_event(self._copied)
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
