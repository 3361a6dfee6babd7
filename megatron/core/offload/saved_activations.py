"""What backward needs of chosen modules, kept in host memory or a file until then.

What autograd saves inside of a region is copied to the host when forward has passed it; backward,
when it comes to a region, starts the copies of the region before it, so that they travel while it
computes (ZeRO-Offload's idea applied to activations: S. Rajbhandari et al., "ZeRO-Infinity",
section 5.1.3, arXiv 2104.07857). No number changes.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext

import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef

from megatron.core.offload.parked_tensors import ParkedTensor, Parking, parking
from megatron.core.step_context.context import current_step, within_step


class SavedActivations:
    """The regions of one micro batch in one model chunk, in the order of forward.

    Args:
        min_numel: smaller tensors stay where they are.
        directory: on a disk, where the others wait in a file; None is host memory.
    """

    def __init__(self, min_numel: int, directory: str | None = None) -> None:
        self._min_numel, self._directory = min_numel, directory
        self._last: _Region | None = None
        self._known: dict[int, tuple[StorageWeakRef, dict[object, _Saved]]] = {}

    @contextmanager
    def region(self, *modules: nn.Module) -> Iterator[None]:
        """Park what is saved inside, but the parameters of `modules`."""
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
            return self._parked(tensor, storage, region)

        with torch.autograd.graph.saved_tensors_hooks(pack, _unpack):
            yield

    def _parked(self, tensor: Tensor, storage: torch.UntypedStorage, region: _Region) -> _Saved:
        """Park a tensor once, however many operations save it."""
        known, views = self._known.get(storage._cdata, (None, {}))
        if known is None or known.expired():
            views = {}
            self._known[storage._cdata] = StorageWeakRef(storage), views
        view = tensor.storage_offset(), tensor.shape, tensor.stride(), tensor.dtype
        if view not in views:
            views[view] = _Saved(self._parking(tensor).park(tensor), region)
        views[view].num_readers += 1
        return views[view]

    def _parking(self, tensor: Tensor) -> Parking:
        return parking(tensor.device, self._directory)


class _Region:
    """Tensors that backward needs at about the same time."""

    def __init__(self, previous: _Region | None) -> None:
        self.previous = previous
        self.saved: weakref.WeakSet[_Saved] = weakref.WeakSet()

    def fetch(self) -> None:
        """Start to copy back what nobody has read yet."""
        for saved in self.saved:
            saved.parked.fetch()


class _Saved:
    """What autograd keeps in the place of a tensor, once for each operation that saved it."""

    def __init__(self, parked: ParkedTensor, region: _Region) -> None:
        self.parked, self.region = parked, region
        self.num_readers = 0
        self._values: Tensor | None = None
        region.saved.add(self)

    def read(self) -> Tensor:
        """Return the values, which stay on the device until the last reader has them."""
        if self._values is None:
            self.region.fetch()
            self._values = self.parked.take()
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
    """Return whether elements share memory, as those of an expanded tensor do."""
    return any(
        stride == 0 and size > 1 for size, stride in zip(tensor.shape, tensor.stride(), strict=True)
    )


def saving_activations(
    is_asked: bool, min_numel: int, directory: str | None = None
) -> AbstractContextManager[None]:
    """Inside, one micro batch passes one model chunk, whose regions belong together.

    Args:
        min_numel, directory: see `SavedActivations`.
    """
    if not is_asked or not torch.is_grad_enabled():
        return nullcontext()
    return within_step(offload_region=SavedActivations(min_numel, directory).region)


def offloading(is_asked: bool, *modules: nn.Module) -> AbstractContextManager[None]:
    """Park what the computation inside saves for backward.

    Nothing happens where it is not asked for, outside of `saving_activations`, and in what is
    recomputed, whose activations live for a moment only.

    Args:
        modules: whose parameters are used inside.
    """
    step = current_step()
    if not is_asked or step.offload_region is None or step.is_checkpointed:
        return nullcontext()
    return step.offload_region(*modules)
