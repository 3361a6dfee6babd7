"""residual + dropout(x + bias), the end of a residual branch.

Dropout is keyed (`megatron.core.parameters.keyed_draws`): the same elements are dropped in every
layout.

Shapes: `s` local rows of the sequence, `b` micro batch, `h` hidden.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from megatron.core.kernels import triton_kernels
from megatron.core.kernels.registry import OTHER_DEVICES, Kernel, KernelTable, Request
from megatron.core.parameters.keyed_draws import keyed_keep_mask

BiasDropoutAdd = Callable[[tuple[Tensor, Tensor | None], Tensor, float], Tensor]


def bias_dropout_add(
    x: Tensor, bias: Tensor | None, residual: Tensor, probability: float, training: bool
) -> Tensor:
    """Return residual + dropout(x + bias).

    Args:
        x: [s, b, h].
        bias: [h] or None.
        residual: [s, b, h]; may be fp32 beside an x of half precision, and decides the dtype of
            the result.
        probability: of dropping an element; kept ones are divided by 1 - probability.
    """
    if not training or probability == 0.0:
        # Autograd keeps nothing for sums: there is nothing to fuse but kernel launches.
        return residual + (x if bias is None else x + bias)
    return BIAS_DROPOUT_ADD.choose(Request.of(x)).kernel.run(x, bias, residual, probability)


def masked_bias_dropout_add(
    x: Tensor, bias: Tensor | None, residual: Tensor, probability: float
) -> Tensor:
    """Return residual + dropout(x + bias) of x, residual [s, b, h] by a mask, which is kept."""
    mask = keyed_keep_mask(x, 1.0 - probability)
    return _BiasDropoutAdd.apply(x, bias, residual, mask, 1.0 / (1.0 - probability))


_MASKED = Kernel("mask", masked_bias_dropout_add)

BIAS_DROPOUT_ADD: KernelTable[Callable[[Tensor, Tensor | None, Tensor, float], Tensor]] = (
    KernelTable(
        "bias, dropout and residual",
        {
            "cpu": (_MASKED,),
            OTHER_DEVICES: (
                triton_kernels.entry("bias_dropout", "bias_dropout_add"),
                _MASKED,
            ),
        },
    )
)
"""Functions of (x [s, b, h], bias [h] or None, residual [s, b, h], probability) -> [s, b, h]."""


class _BiasDropoutAdd(torch.autograd.Function):
    """One new tensor forward, one backward; the mask is all that is kept."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        bias: Tensor | None,
        residual: Tensor,
        mask: Tensor,
        scale: float,
    ) -> Tensor:
        ctx.dtypes = x.dtype, None if bias is None else bias.dtype, residual.dtype
        ctx.scale = scale
        ctx.save_for_backward(mask)
        if bias is None:
            return torch.add(residual, x * mask, alpha=scale)
        return torch.add(residual, (x + bias).mul_(mask), alpha=scale)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        (mask,) = ctx.saved_tensors
        of_x, of_bias, of_residual = ctx.dtypes
        dropped = (grad * mask).mul_(ctx.scale).to(of_x)
        return dropped, _bias_gradient(ctx, dropped, of_bias), grad.to(of_residual), None, None


def _bias_gradient(ctx: Any, grad: Tensor, dtype: torch.dtype | None) -> Tensor | None:
    if dtype is None or not ctx.needs_input_grad[1]:
        return None
    return grad.reshape(-1, grad.shape[-1]).sum(0).to(dtype)


def _train(x_with_bias: tuple[Tensor, Tensor | None], residual: Tensor, prob: float) -> Tensor:
    x, bias = x_with_bias
    return bias_dropout_add(x, bias, residual, prob, True)


def _evaluate(x_with_bias: tuple[Tensor, Tensor | None], residual: Tensor, prob: float) -> Tensor:
    x, bias = x_with_bias
    return bias_dropout_add(x, bias, residual, prob, False)


def get_bias_dropout_add(training: bool, fused: bool) -> BiasDropoutAdd:
    """Return the function (x_with_bias, residual, prob) -> residual + dropout(x + bias).

    Args:
        training: False leaves dropout out.
        fused: accepted for compatibility; there is one implementation.
    """
    return _train if training else _evaluate
