"""Compare a kernel, run by Triton's interpreter or on a device, with a plain formula in fp64."""

import os

import torch

from tests.gpu_without_gpu.triton_kernels.host_as_device import WHERE
from tests.harness.tolerances import (
    BF16_REORDERED_SUM,
    BF16_TRUNCATED,
    FP32_REORDERED_SUM,
    assert_close,
)

assert WHERE == "1" or os.environ.get("TRITON_INTERPRET") == "1", "these run in the interpreter"
TOLERANCE_OF = {torch.float32: FP32_REORDERED_SUM, torch.bfloat16: BF16_TRUNCATED}


def as_tuple(found):
    return found if isinstance(found, tuple) else (found,)


def compare(run, reference, inputs, tolerance, sums=()):
    """Compare the outputs, and the gradients of all inputs; the reference computes in fp64.

    sums: indices of inputs whose gradients are sums of rounded gradients.
    """
    exact = [x.detach().double().requires_grad_() for x in inputs]
    inputs = [x.detach().requires_grad_() for x in inputs]
    outputs, expected = as_tuple(run(*inputs)), as_tuple(reference(*exact))
    weights = [torch.randn(e.shape).to(out.dtype) for out, e in zip(outputs, expected, strict=True)]
    loss = sum((out * weight).sum() for out, weight in zip(outputs, weights, strict=True))
    found = torch.autograd.grad(loss, inputs)
    loss = sum((e * weight.double()).sum() for e, weight in zip(expected, weights, strict=True))
    wanted = torch.autograd.grad(loss, exact)
    for index, (out, e) in enumerate(zip(outputs, expected, strict=True)):
        assert_close(out, e, tolerance, f"output {index}")
    for index, (a, e) in enumerate(zip(found, wanted, strict=True)):
        assert a.dtype == inputs[index].dtype
        is_sum = index in sums and tolerance is BF16_TRUNCATED
        allowed = BF16_REORDERED_SUM if is_sum else tolerance
        assert_close(a, e, allowed, f"gradient of input {index}")
