"""A copy of this rank's share of a checkpoint, kept in one host buffer from save to save."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from megatron.core import device


class SnapshotBuffer:
    """Host memory that an asynchronous save writes from while training goes on.

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

    def copy_of(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        """Copy tensors, given in order of falling element size, and return the copies.

        The copies are contiguous CPU tensors, valid until the next call.
        """
        sizes = [t.numel() * t.element_size() for t in tensors]
        if sum(sizes) > self._memory.numel():
            self._memory = torch.empty(0, dtype=torch.uint8)  # free the old before the new
            on_device = device.device_type() != "cpu"
            self._memory = torch.empty(sum(sizes), dtype=torch.uint8, pin_memory=on_device)
        copies, position = [], 0
        for tensor, size in zip(tensors, sizes, strict=True):
            part = self._memory[position : position + size].view(tensor.dtype).view(tensor.shape)
            copies.append(part.copy_(tensor.detach(), non_blocking=True))
            position += size
        device.synchronize()
        return copies
