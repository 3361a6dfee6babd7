"""The one place that asks which kind of device this process computes on."""

from __future__ import annotations

import functools
import os

import torch


@functools.cache
def device_type() -> str:
    """Return "cuda" (or another torch accelerator) when one is present, else "cpu".

    `LATTICE_DEVICE=cpu` forces the CPU, for debugging a layout on a machine that has GPUs.
    """
    forced = os.environ.get("LATTICE_DEVICE")
    if forced:
        return forced
    if torch.accelerator.is_available():
        accelerator = torch.accelerator.current_accelerator()
        if accelerator is not None:
            return accelerator.type
    return "cpu"


def current_device() -> torch.device:
    """Return the device that new parameters and activations of this rank live on."""
    if device_type() == "cpu":
        return torch.device("cpu")
    return torch.device(device_type(), torch.accelerator.current_device_index())


def set_local_device(local_rank: int) -> torch.device:
    """Bind this process to the accelerator `local_rank`; no effect on CPU."""
    if device_type() != "cpu":
        torch.accelerator.set_device_index(local_rank)
    return current_device()


def communication_backend() -> str:
    """Return the name of the torch.distributed backend for this device: "nccl" or "gloo"."""
    return {"cuda": "nccl"}.get(device_type(), "gloo")


def synchronize() -> None:
    """Wait for all work queued on this rank's accelerator; no effect on CPU."""
    if device_type() != "cpu":
        torch.accelerator.synchronize()


def peak_memory_bytes() -> int:
    """Return the peak bytes allocated on the accelerator, or the peak RSS on CPU."""
    if device_type() != "cpu":
        return torch.get_device_module(device_type()).max_memory_allocated()
    import resource

    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def multiprocessor_count() -> int:
    """Return the number of multiprocessors of the accelerator, or of CPU cores."""
    if device_type() == "cpu":
        return os.cpu_count() or 1
    module = torch.get_device_module(device_type())
    return module.get_device_properties(current_device()).multi_processor_count
