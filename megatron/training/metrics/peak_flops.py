"""Peak rate of a device: from a table for known GPUs, measured for other GPUs."""

from __future__ import annotations

import functools
import time

import torch

from megatron.core.foundation import device

PEAK_16_BIT_TFLOPS = {
    "A100": 312.0,
    "A800": 312.0,
    "H100": 989.0,
    "H800": 989.0,
    "H200": 989.0,
    "GH200": 989.0,
    "GB200": 2450.0,
    "GB300": 2450.0,
    "B200": 2250.0,
    "B300": 2250.0,
    "L40S": 362.0,
    "V100": 125.0,
    "RTX 4090": 165.0,
}
"""Part of the device's name -> dense 16-bit rate; the longest matching part is used."""

PEAK_TF32_SHARE = 0.5
"""Rate of fp32 inputs on tensor cores (TF32), as a share of the 16-bit rate."""


def peak_of_gpu(name: str, dtype: torch.dtype) -> float | None:
    """Return the dense peak in FLOP/s of a GPU, None if its name is not in the table."""
    matches = [part for part in PEAK_16_BIT_TFLOPS if part in name]
    if not matches:
        return None
    peak = PEAK_16_BIT_TFLOPS[max(matches, key=len)] * 1e12
    return peak * PEAK_TF32_SHARE if dtype == torch.float32 else peak


def measured_matmul_rate(dtype: torch.dtype, *, size: int = 8192, seconds: float = 0.15) -> float:
    """Return the best FLOP/s of a square matrix product on this process' device and threads."""
    where = device.current_device()
    left = torch.randn(size, size, device=where).to(dtype)
    right = torch.randn(size, size, device=where).to(dtype)
    best, deadline = 0.0, time.perf_counter() + seconds
    while time.perf_counter() < deadline or best == 0.0:
        device.synchronize()
        start = time.perf_counter()
        left @ right
        device.synchronize()
        best = max(best, 2 * size**3 / (time.perf_counter() - start))
    return best


@functools.cache
def peak_flops(dtype: torch.dtype) -> float | None:
    """Return the peak FLOP/s of this rank's device for matrix products of `dtype`.

    None on a CPU: other processes share its cores, so a measured rate is no upper bound, and a
    share of it can exceed 1.
    """
    if device.device_type() != "cuda":
        return None
    known = peak_of_gpu(device.device_name(), dtype)
    return measured_matmul_rate(dtype) if known is None else known
