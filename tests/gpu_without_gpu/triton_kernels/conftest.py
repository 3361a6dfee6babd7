"""Every comparison starts with the same numbers, on the CPU or on the accelerator."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest
import torch

from megatron.core.foundation import device
from megatron.core.parameters.rng import rng_state


@pytest.fixture(autouse=True)
def fixed() -> Iterator[None]:
    rng_state().__init__()
    rng_state().counts_on_cpu = True
    if os.environ.get("LATTICE_TEST_KERNELS_ON_DEVICE") != "1":
        torch.manual_seed(0)
        yield
        return
    with pytest.MonkeyPatch.context() as patch:
        patch.delenv("LATTICE_DEVICE", raising=False)
        device.device_type.cache_clear()
        with device.current_device():
            torch.manual_seed(0)
            yield
    device.device_type.cache_clear()
