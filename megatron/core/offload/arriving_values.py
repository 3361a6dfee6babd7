"""Values that are computed in host memory and belong to the device: copied part by part."""

from __future__ import annotations

import torch
from torch import Tensor

from megatron.core.foundation.device import is_host_memory
from megatron.core.offload.device_copies import Copy, DeviceCopies


class ArrivingValues:
    """Copies to one bucket of the device's values; whoever reads the bucket waits for them."""

    def __init__(self, copies: DeviceCopies) -> None:
        """
        Args:
            copies: to the device; several buckets may share it.
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
        """Return the copies that nobody has waited for; the caller does."""
        pending, self._pending = self._pending, []
        return pending
