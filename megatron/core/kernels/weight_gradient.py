"""The table of products that are added to a main gradient of another dtype.

Entries are functions of (parameter, left [m, t], right [t, n]): they add left @ right to
`parameter.main_grad` [m, n], or overwrite it where it is fresh.
"""

from __future__ import annotations

import functools
from collections.abc import Callable

import torch
from torch import Tensor

from megatron.core.foundation.device import current_device
from megatron.core.kernels.registry import OTHER_DEVICES, Kernel, KernelTable, Request
from megatron.core.parameters.param_meta import accumulate_main_grad

OTHER_SUM = "a main gradient that is not fp32"


def apart(parameter: Tensor, left: Tensor, right: Tensor) -> None:
    """Compute the product in the dtype of left [m, t] and right [t, n], then add it."""
    accumulate_main_grad(parameter, left @ right)


def in_one_product(parameter: Tensor, left: Tensor, right: Tensor) -> None:
    """Add left [m, t] @ right [t, n] in one GEMM: its fp32 sums are not rounded before."""
    _add_product(parameter.main_grad, left, right, 0 if parameter.main_grad_is_fresh else 1)
    parameter.main_grad_is_fresh = False


def _add_product(total: Tensor, left: Tensor, right: Tensor, beta: int) -> None:
    torch.ops.aten.addmm.dtype_out(total, left, right, torch.float32, beta=beta, out=total)


@functools.cache
def _missing() -> str | None:
    """Return why torch cannot do it on this device; the test is one product."""
    if not hasattr(torch.ops.aten.addmm, "dtype_out"):
        return "needs a torch whose addmm has an out_dtype"
    where = current_device()
    for dtype in (torch.bfloat16, torch.float16):
        left = torch.ones(16, 16, dtype=dtype, device=where)
        total = torch.full((16, 16), torch.nan, device=where)
        try:
            _add_product(total, left.t(), left, 0)
            _add_product(total, left.t(), left, 1)
        except (RuntimeError, TypeError) as error:
            return f"torch refuses {dtype} into fp32: {str(error).splitlines()[0]}"
        if not bool((total == 32.0).all()):
            return f"torch's sums of {dtype} in fp32 are wrong"
    return None


_APART = Kernel("product-and-sum", apart, frozenset({OTHER_SUM}))

WEIGHT_GRADIENT: KernelTable[Callable[[Tensor, Tensor, Tensor], None]] = KernelTable(
    "weight gradients in fp32",
    {
        "cuda": (
            Kernel(
                "addmm-into-fp32",
                in_one_product,
                dtypes=frozenset({"bfloat16", "float16"}),
                missing=lambda: _missing(),
            ),
            _APART,
        ),
        OTHER_DEVICES: (_APART,),
    },
)


def main_grad_addmm(parameter: Tensor, left: Tensor, right: Tensor) -> None:
    """Add the product left [m, t] @ right [t, n] into the main gradient [m, n].

    Where the dtypes agree the GEMM writes directly into the buffer.
    """
    main_grad = parameter.main_grad
    if main_grad.dtype != left.dtype:
        needs = () if main_grad.dtype == torch.float32 else (OTHER_SUM,)
        WEIGHT_GRADIENT.choose(Request.of(left, needs)).kernel.run(parameter, left, right)
    elif parameter.main_grad_is_fresh:
        torch.mm(left, right, out=main_grad)
        parameter.main_grad_is_fresh = False
    else:
        main_grad.addmm_(left, right)
