"""Every comparison starts with the same numbers, on the CPU or on the accelerator."""

import functools
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from typing import Any

import pytest
import torch
from torch import Tensor

from megatron.core.foundation import device
from megatron.core.parameters.rng import rng_state
from tests.gpu_without_gpu.triton_kernels.host_as_device import (
    ON_DEVICE,
    WHERE,
    host_as_device,
)


@pytest.fixture(scope="session")
def accelerator() -> Iterator[torch.device]:
    """The device of new tensors."""
    if not ON_DEVICE:
        yield device.current_device()
        return
    with pytest.MonkeyPatch.context() as patch, ExitStack() as posing:
        patch.delenv("LATTICE_DEVICE", raising=False)
        if WHERE == "rehearsed":
            posing.enter_context(host_as_device(patch))
        device.device_type.cache_clear()
        yield device.current_device()
    device.device_type.cache_clear()


@pytest.fixture(autouse=True)
def fixed(accelerator: torch.device, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    rng_state().__init__()
    rng_state().counts_on_cpu = True
    torch.manual_seed(0)
    if not ON_DEVICE:
        yield
        return
    for name in ("rand", "randint", "randn"):
        draw = getattr(torch, name)
        monkeypatch.setattr(torch, name, functools.partial(drawn_on_cpu, draw, accelerator))
    with accelerator:
        yield


def drawn_on_cpu(draw: Callable[..., Tensor], accelerator: torch.device, *sizes: Any) -> Tensor:
    """Return random numbers on the device: those that the rehearsal and the interpreter draw."""
    return draw(*sizes, device="cpu").to(accelerator)
