"""Let Python code that was written for CUDA compute on the CPU.

The calls of torch that such code makes are answered as one H100 would answer them, and tensors that
are asked for on the device lie in host memory. It changes torch for the whole process.
"""

import contextlib
import functools
import types
from collections.abc import Callable
from typing import Any

import torch

_MAKERS = [
    *("arange", "as_tensor", "empty", "empty_like", "empty_strided", "full", "full_like", "ones"),
    *("ones_like", "rand", "randn", "tensor", "zeros", "zeros_like"),
]


def _names_the_device(device: object) -> bool:
    is_index = isinstance(device, int) and not isinstance(device, bool)
    return is_index or str(device).startswith("cuda")


def _on_host(make: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(make)
    def made_on_host(*args: Any, **options: Any) -> Any:
        if _names_the_device(options.get("device")):
            options["device"] = "cpu"
        return make(*args, **options)

    return made_on_host


def _moved_to_host(move: Callable[..., Any]) -> Callable[..., Any]:
    by_keyword = _on_host(move)

    @functools.wraps(move)
    def moved(tensor: torch.Tensor, *args: Any, **options: Any) -> Any:
        to = [
            "cpu" if isinstance(x, str | torch.device | int) and _names_the_device(x) else x
            for x in args
        ]
        return by_keyword(tensor, *to, **options)

    return moved


class _HostStream:
    """A stream whose work is done when it is queued."""

    def __init__(self, *_: object, **__: object) -> None: ...

    def synchronize(self) -> None: ...

    def wait_stream(self, _stream: object) -> None: ...


@functools.cache
def compute_cuda_calls_on_host() -> None:
    """Answer torch's calls for CUDA from here on; once in a process."""
    cuda = torch.cuda  # noqa: TID251 (it is what is replaced)
    torch.version.cuda = torch.version.cuda or "13.0"
    cuda.is_available = lambda: True
    cuda.get_device_capability = lambda *_: (9, 0)
    cuda.get_device_properties = lambda *_: types.SimpleNamespace(
        major=9,
        minor=0,
        multi_processor_count=132,
        total_memory=80 << 30,
        name="imaginary H100",
    )
    cuda.current_device = lambda: 0
    # Each has a function of its own: torch's compiler knows its functions by identity.
    cuda.set_device = lambda *_: None
    cuda.synchronize = lambda *_: None
    cuda.empty_cache = lambda: None
    cuda.memory_stats = lambda *_: {}
    cuda.Stream = _HostStream
    cuda.current_stream = _HostStream
    cuda.stream = lambda _: contextlib.nullcontext()
    cuda.is_current_stream_capturing = lambda: False
    cuda.nvtx.range_push = cuda.nvtx.range_pop = lambda *_: None
    torch.Tensor.is_cuda = property(lambda _: True)
    torch.Tensor.cuda = lambda tensor, *_, **__: tensor
    torch.nn.Module.cuda = lambda module, *_: module
    torch.Tensor.to = _moved_to_host(torch.Tensor.to)
    for name in _MAKERS:
        setattr(torch, name, _on_host(getattr(torch, name)))
