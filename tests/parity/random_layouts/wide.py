"""Put fp64 in the place of fp32, and fp32 in that of bf16 and fp16, for a whole process.

Imported before anything of the project, whose modules then see the other types under the usual
names. Two layouts add the same numbers in two orders; in fp64 that no longer shows, so what still
differs is not rounding. The half precisions stay apart from the full one: main weights, casts and
loss scales do what they do.
"""

import importlib
from typing import Any

import torch
from torch import Tensor

NARROW = torch.float32
"""The type that stands for the half precisions, under its own name no longer reachable."""


def _widen_types() -> None:
    for remembered in (
        torch.storage._dtype_to_storage_type_map,  # tensors are pickled by these
        torch.storage._storage_type_to_dtype_map,
    ):
        remembered()
    torch.float32 = torch.float = torch.float64
    torch.bfloat16 = torch.float16 = torch.half = NARROW
    Tensor.float = Tensor.double
    Tensor.bfloat16 = Tensor.half = _to_narrow
    torch.set_default_dtype(torch.float64)


def _to_narrow(self: Tensor, *args: Any, **kwargs: Any) -> Tensor:
    return self.to(NARROW, *args, **kwargs)


def _widen_kernels() -> None:
    """Give fused kernels what they take: numbers of a step in fp32, or all tensors in one type."""
    for name in ("_fused_adam_", "_fused_adamw_"):
        setattr(torch, name, _with_plain_scaling(getattr(torch, name), has_steps=True))
    torch._fused_sgd_ = _with_plain_scaling(torch._fused_sgd_, has_steps=False)
    for holder, name in (
        (torch, "native_layer_norm"),
        (torch, "layer_norm"),
        (torch.ops.aten, "native_layer_norm_backward"),
    ):
        setattr(holder, name, _in_one_type(getattr(holder, name)))


def _with_plain_scaling(kernel: Any, *, has_steps: bool) -> Any:
    def widened(
        weights: list[Tensor], gradients: list[Tensor], *states: Any,
        grad_scale: Tensor | None = None, found_inf: Tensor | None = None, **options: Any,
    ) -> None:  # fmt: skip
        if found_inf is not None and bool(found_inf):
            return
        if grad_scale is not None:
            torch._foreach_div_(gradients, grad_scale)
        if has_steps:
            states = (*states[:-1], [step.to(NARROW) for step in states[-1]])
        kernel(weights, gradients, *states, grad_scale=None, found_inf=None, **options)

    return widened


def _in_one_type(kernel: Any) -> Any:
    def widened(*given: Any, **named: Any) -> Any:
        types = {x.dtype for x in (*given, *named.values()) if isinstance(x, Tensor)}
        if len(types) == 1:
            return kernel(*given, **named)
        result = kernel(
            *(_as_double(x) for x in given), **{n: _as_double(x) for n, x in named.items()}
        )
        if isinstance(result, Tensor):
            return result.to(given[0].dtype)
        return (result[0].to(given[0].dtype), *result[1:])

    return widened


def _as_double(value: Any) -> Any:
    return value.double() if isinstance(value, Tensor) else value


_widen_types()
importlib.import_module("torch._dynamo")  # it looks at kernels as it is imported, unchanged ones
_widen_kernels()
