"""residual + dropout(x + bias); forward and backward compute the mask in registers.

Shapes: `s` local rows of the sequence, `b` micro batch, `h` hidden.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from megatron.core.parameters.counter_random import keep_threshold
from megatron.core.parameters.keyed_draws import ActivationDraw
from megatron.core.parameters.rng import rng_state

COLUMNS = 1024
"""Columns of a program: eight elements, two calls of Philox, per thread."""
NUM_WARPS = 4


@triton.jit
def dropout_kernel(
    x_ptr, bias_ptr, residual_ptr, positions_ptr, out_ptr, width, batch, seed, first_sample,
    threshold, scale, HAS_BIAS: tl.constexpr, HAS_RESIDUAL: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """Compute some columns of one row of one sample; backward has neither bias nor residual."""
    row = tl.program_id(0).to(tl.int64)
    first = tl.program_id(1) * COLUMNS
    columns = first + tl.arange(0, COLUMNS)
    inside = columns < width
    y = tl.load(x_ptr + row * width + columns, mask=inside, other=0.0).to(tl.float32)
    if HAS_BIAS:
        y += tl.load(bias_ptr + columns, mask=inside, other=0.0).to(tl.float32)
    sample = (first_sample + row % batch).to(tl.int32)
    position = tl.load(positions_ptr + row // batch)
    # One call of Philox 4x32-10 gives the words of four adjacent columns, as `counter_random` does.
    calls = first // 4 + tl.arange(0, COLUMNS // 4)
    zeros = calls * 0
    w0, w1, w2, w3 = tl.philox(seed, calls, zeros + position, zeros, zeros + sample)
    words = tl.reshape(tl.join(tl.join(w0, w2), tl.join(w1, w3)), (COLUMNS,))
    y = tl.where(words < tl.cast(threshold, tl.uint32), y * scale, 0.0)
    if HAS_RESIDUAL:
        y += tl.load(residual_ptr + row * width + columns, mask=inside, other=0.0).to(tl.float32)
    tl.store(out_ptr + row * width + columns, y.to(out_ptr.dtype.element_ty), mask=inside)


class _BiasDropoutAdd(torch.autograd.Function):
    """x [s, b, h], bias [h] or None, residual [s, b, h] -> [s, b, h]; keeps only the place."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, bias: Tensor | None, residual: Tensor, drawn: ActivationDraw,
        keep: float,
    ) -> Tensor:  # fmt: skip
        out = torch.empty_like(residual)
        ctx.place = drawn.rows.positions(x.device).to(torch.int32), drawn.seed, drawn.first_sample
        ctx.keep, ctx.dtype = keep, x.dtype
        ctx.bias_dtype = None if bias is None else bias.dtype
        _launch(x, bias, residual, out, ctx.place, keep)
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        grad_x = torch.empty(grad.shape, dtype=ctx.dtype, device=grad.device)
        _launch(grad.contiguous(), None, None, grad_x, ctx.place, ctx.keep)
        grad_bias = None
        if ctx.bias_dtype is not None and ctx.needs_input_grad[1]:
            grad_bias = grad_x.flatten(0, -2).sum(0).to(ctx.bias_dtype)
        return grad_x, grad_bias, grad, None, None


def _launch(
    x: Tensor, bias: Tensor | None, residual: Tensor | None, out: Tensor,
    place: tuple[Tensor, int, int], keep: float,
) -> None:  # fmt: skip
    positions, seed, first_sample = place
    batch, width = x.shape[1], x.shape[-1]
    dropout_kernel[(x.shape[0] * batch, triton.cdiv(width, COLUMNS))](
        x, x if bias is None else bias, x if residual is None else residual, positions, out,
        width, batch, seed, first_sample, keep_threshold(keep), 1.0 / keep,
        HAS_BIAS=bias is not None, HAS_RESIDUAL=residual is not None, COLUMNS=COLUMNS,
        num_warps=NUM_WARPS,
    )  # fmt: skip


def bias_dropout_add(
    x: Tensor, bias: Tensor | None, residual: Tensor, probability: float
) -> Tensor:
    """Return residual + dropout(x + bias) of x and residual [s, b, h], bias [h] or None."""
    drawn = ActivationDraw.next(x, rng_state().scope.rows)
    x, residual = x.contiguous(), residual.contiguous()
    return _BiasDropoutAdd.apply(x, bias, residual, drawn, 1.0 - probability)
