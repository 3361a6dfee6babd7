"""A device that is the CPU under another name: what mixes devices fails here as on a GPU.

Its tensors hold tensors of the CPU. Each operation refuses tensors of two devices (but for a
number, as torch does) and a generator of another device; kernels take tensors of the device alone.
Kernels multiply matrices of bf16 and round to the nearest, as hardware does; Triton's interpreter
multiplies their bits and cuts.
"""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten, tree_map, tree_unflatten

WHERE = os.environ.get("LATTICE_TEST_KERNELS_ON_DEVICE")
"""1: the kernels are compiled and run on this machine's accelerator, as `make gpu` does; rehearsed:
Triton's interpreter runs them on a device that the CPU poses as."""
ON_DEVICE = WHERE in ("1", "rehearsed")
NAME = "meta"  # the name of a device that torch itself starts nothing for
_MOVES = (torch.ops.aten._to_copy.default, torch.ops.aten.copy_.default)


class OnDevice(Tensor):
    """A tensor of the device."""

    host: Tensor

    @staticmethod
    def __new__(cls, host):
        made = Tensor._make_wrapper_subclass(
            cls, host.size(), strides=host.stride(), storage_offset=host.storage_offset(),
            dtype=host.dtype, device=torch.device("cpu"), dispatch_device=True,
        )  # fmt: skip
        made.host = host
        return made

    __torch_function__ = torch._C._disabled_torch_function_impl

    @classmethod
    def __torch_dispatch__(cls, operation, types, args=(), options=None):
        return _compute(operation, args, options or {})


class _Factories(TorchDispatchMode):
    """Sees operations without a tensor of the device: those that make one."""

    def __torch_dispatch__(self, operation, types, args=(), options=None):
        return _compute(operation, args, options or {})


def _compute(operation: Any, args: Any, options: dict[str, Any]) -> Any:
    if operation is torch.ops.prim.device.default:
        return torch.device(NAME, 0)
    leaves, structure = tree_flatten((args, options))
    tensors = [x for x in leaves if isinstance(x, Tensor)]
    is_there = any(isinstance(x, OnDevice) for x in tensors)
    if is_there and operation not in _MOVES:
        elsewhere = [x.shape for x in tensors if not isinstance(x, OnDevice) and x.dim() > 0]
        assert not elsewhere, (
            f"{operation} takes tensors of two devices: {elsewhere} are on the CPU"
        )
    target = options.get("device")
    kind = torch.device(target).type if target is not None else NAME if is_there else "cpu"
    generator = options.get("generator")
    assert generator is None or generator.device.type == kind, f"{operation}: generator of the CPU"
    owners = {id(x.host): x for x in tensors if isinstance(x, OnDevice)}

    def on_host(x):
        is_device = isinstance(x, torch.device) and x.type == NAME
        return x.host if isinstance(x, OnDevice) else torch.device("cpu") if is_device else x

    args, options = tree_unflatten([on_host(x) for x in leaves], structure)
    if target is not None and kind == NAME:
        options = options | {"device": torch.device("cpu")}
    found = operation(*args, **options)
    if kind == "cpu":
        return found

    def there(x):
        if type(x) is not Tensor:
            return x
        return owners[id(x)] if id(x) in owners else OnDevice(x)

    return tree_map(there, found)


@contextmanager
def host_as_device(patch: pytest.MonkeyPatch) -> Iterator[None]:
    """Inside, this process has the device, on which Triton's interpreter computes kernels."""
    import triton.language as tl
    from triton.runtime.interpreter import InterpretedFunction, InterpreterBuilder, TensorHandle

    address, run = Tensor.data_ptr, InterpretedFunction.run
    multiply, convert = InterpreterBuilder.create_dot, InterpreterBuilder.cast_impl

    def widened(x):
        if x.dtype.scalar != tl.bfloat16:
            return x
        return TensorHandle((x.data.astype(np.uint32) << 16).view(np.float32), tl.float32)

    def multiply_bf16_too(builder, a, b, *rest):
        return multiply(builder, widened(a), widened(b), *rest)

    def convert_to_nearest_bf16(builder, x, dtype):
        if (x.dtype.scalar, dtype.scalar) != (tl.float32, tl.bfloat16):
            return convert(builder, x, dtype)
        values = torch.from_numpy(np.array(x.data, ndmin=1)).bfloat16()
        return TensorHandle(values.view(torch.uint16).numpy().reshape(x.data.shape), tl.bfloat16)

    def run_there(kernel, *args, **options):
        tensors = [x for x in tree_flatten((args, options))[0] if isinstance(x, Tensor)]
        assert all(isinstance(x, OnDevice) for x in tensors), "a kernel got a tensor of the CPU"
        args, options = tree_map(lambda x: getattr(x, "host", x), (args, options))
        with torch._C._DisableTorchDispatch():
            return run(kernel, *args, **options)

    patch.setenv("LATTICE_DEVICE", NAME)
    patch.setattr(torch.accelerator, "current_device_index", lambda: 0)
    patch.setattr(InterpretedFunction, "run", run_there)
    patch.setattr(InterpreterBuilder, "create_dot", multiply_bf16_too)
    patch.setattr(InterpreterBuilder, "cast_impl", convert_to_nearest_bf16)
    patch.setattr(Tensor, "data_ptr", lambda x: address(getattr(x, "host", x)))
    torch._C._set_only_lift_cpu_tensors(True)  # `torch.tensor` copies from the CPU, seen here
    try:
        with _Factories(), torch.autograd.set_multithreading_enabled(False):
            yield
    finally:
        torch._C._set_only_lift_cpu_tensors(False)
