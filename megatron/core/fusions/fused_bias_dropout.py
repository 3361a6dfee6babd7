"""residual + dropout(x + bias), the end of a residual branch.

Dropout is keyed (`megatron.core.parameters.keyed_draws`): the same elements are dropped in every
layout.

Shapes: `s` local tokens of the sequence, `b` micro batch, `h` hidden.
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
        residual: [s, b, h]; the result has its dtype, which may be fp32 for an x in half precision.
        probability: probability of dropping an element; others are divided by 1 - probability.
    """
    if not training or probability == 0.0:
        # Autograd saves nothing for sums: fusion would save kernel launches only.
        return residual + (x if bias is None else x + bias)
    return BIAS_DROPOUT_ADD.choose(Request.of(x)).kernel.run(x, bias, residual, probability)


def masked_bias_dropout_add(
    x: Tensor, bias: Tensor | None, residual: Tensor, probability: float
) -> Tensor:
    """Return residual + dropout(x + bias) of x, residual [s, b, h]; backward reads the mask."""
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
    """Allocates one tensor in forward and one in backward; saves the mask only."""

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
        ctx.bias_shape = None if bias is None else bias.shape
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
        grad_bias = None
        if of_bias is not None and ctx.needs_input_grad[1]:
            grad_bias = dropped.sum_to_size(ctx.bias_shape).to(of_bias)
        return dropped, grad_bias, grad.to(of_residual), None, None


def get_bias_dropout_add(training: bool, fused: bool) -> BiasDropoutAdd:
    """Return the function (x_with_bias, residual, prob) -> residual + dropout(x + bias).

    Args:
        training: False disables dropout.
        fused: accepted for compatibility; there is one implementation.
    """

    def add(x_with_bias: tuple[Tensor, Tensor | None], residual: Tensor, prob: float) -> Tensor:
        return bias_dropout_add(*x_with_bias, residual, prob, training)

    return add
