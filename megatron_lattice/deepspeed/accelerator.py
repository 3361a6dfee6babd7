"""`deepspeed.accelerator`: queries about the device of this process."""

from __future__ import annotations

import torch

from megatron.core.foundation import device


class Accelerator:
    """DeepSpeed's methods on `megatron.core.foundation.device`."""

    def device_name(self, device_index: int | None = None) -> str:
        """Return "cpu", "cuda" or "cuda:1"."""
        kind = device.device_type()
        return kind if device_index is None or kind == "cpu" else f"{kind}:{device_index}"

    def current_device_name(self) -> str:
        """Return the name of the device for new tensors of this process."""
        return str(device.current_device())

    def current_device(self) -> int:
        """Return the number of the current device."""
        return device.current_device().index or 0

    def set_device(self, device_index: int) -> None:
        """Bind this process to a device."""
        device.set_local_device(device_index)

    def device_count(self) -> int:
        """Return the number of accelerators of this machine; 1 without any."""
        return max(1, torch.accelerator.device_count())

    def communication_backend_name(self) -> str:
        """Return the backend of torch.distributed."""
        return device.communication_backend()

    def is_available(self) -> bool:
        """Return whether there is a device to compute on."""
        return True

    def synchronize(self, device_index: int | None = None) -> None:
        """Wait for the work queued on the device."""
        device.synchronize()

    def max_memory_allocated(self, device_index: int | None = None) -> int:
        """Return the peak bytes allocated on the device; on a CPU, of this process."""
        return device.peak_memory_bytes()


_ACCELERATOR = Accelerator()


def get_accelerator() -> Accelerator:
    """Return the accelerator of this process."""
    return _ACCELERATOR
