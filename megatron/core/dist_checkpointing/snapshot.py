"""A copy of this rank's share of a checkpoint, kept in one host buffer from save to save."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import Future

import torch
from torch import Tensor

from megatron.core.dist_checkpointing.thread_pool import ThreadPool, threads_per_rank
from megatron.core.foundation import device

_CHUNK_BYTES = 16 << 20
"""Threads copy so much at a time: training waits for the copy, so all cores of a rank help."""


class SnapshotBuffer:
    """Host memory that an asynchronous save writes from while training continues.

    It is allocated once (first-touch of fresh pages costs several times the copy), grows to the
    largest save, and is pinned where an accelerator copies into it. Extra memory is exactly the
    bytes that this rank writes.
    """

    def __init__(self) -> None:
        self._memory = torch.empty(0, dtype=torch.uint8)

    @property
    def num_bytes(self) -> int:
        """Size of the buffer."""
        return self._memory.numel()

    @property
    def memory(self) -> Tensor:
        """The buffer [bytes]; the latest copies begin at byte 0, in the order given."""
        return self._memory

    def copy_of(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        """Copy tensors [...], given in `storage_order`, and return copies of the same shapes.

        The copies are contiguous CPU tensors, valid until the next call.
        """
        sizes = [t.numel() * t.element_size() for t in tensors]
        if sum(sizes) > self._memory.numel():
            self._memory = torch.empty(0, dtype=torch.uint8)  # free the old before the new
            on_device = not device.is_host_memory(device.current_device())
            self._memory = torch.empty(sum(sizes), dtype=torch.uint8, pin_memory=on_device)
        copies, position = [], 0
        with ThreadPool(threads_per_rank()) as threads:
            started: list[Future] = []
            for tensor, size in zip(tensors, sizes, strict=True):
                tensor = tensor.detach()
                part = self._memory[position : position + size].view(tensor.dtype)
                copies.append(part.view(tensor.shape))
                position += size
                if not device.is_host_memory(tensor.device) or not tensor.is_contiguous():
                    copies[-1].copy_(tensor, non_blocking=True)
                    continue
                step = max(1, _CHUNK_BYTES // tensor.element_size())
                chunks = zip(part.split(step), tensor.reshape(-1).split(step), strict=True)
                started += [threads.start(into.copy_, chunk) for into, chunk in chunks]
        for future in started:
            future.result()
        device.synchronize()
        return copies
