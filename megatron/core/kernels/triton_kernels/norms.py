"""RMSNorm (arXiv 1910.07467) and LayerNorm (arXiv 1607.06450) over the last dimension.

A row may be a sum, residual + x + bias, that is computed, stored and normalised in one pass.

A program holds one row in registers, so forward reads each element once. Backward keeps a sum of
the weight's gradient over the rows of a program. Rows wider than `WIDEST_FUSED` leave too few
registers for it: a second kernel reads the rows again and computes the sums.

Sums are fp32. Shapes: `t` rows, `h` width.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from megatron.core.kernels import norms as plain

WIDEST = 16384
"""Wider rows do not fit into registers: torch computes them."""
WIDEST_ADDED = 8192
"""The same with a residual."""
WIDEST_FUSED = 4096
"""Widest row whose backward also sums the gradients of weight and bias."""
MAX_PROGRAMS = 512
"""Programs of the fused backward; each writes a row of partial sums."""
SUM_ROWS, SUM_COLUMNS = 32, 64
"""Tile of the kernel that sums over rows."""


def launch_of(width: int) -> dict[str, int]:
    """Return the block and the warps for rows of `width`: at most 32 elements per thread."""
    block = max(16, triton.next_power_of_2(width))
    return {"BLOCK": block, "num_warps": min(16, max(1, block // 512))}


def backward_launch_of(width: int, adds: bool) -> dict[str, int]:
    """Return the same for backward: a residual's gradient needs more registers for each thread."""
    launch = launch_of(width)
    return launch | {"num_warps": min(8, launch["num_warps"])} if adds else launch


@triton.jit
def forward_kernel(
    x_ptr, residual_ptr, added_ptr, weight_ptr, bias_ptr, sum_ptr, out_ptr, mean_ptr, rstd_ptr,
    width, eps, ADDS: tl.constexpr, HAS_ADDED_BIAS: tl.constexpr, CENTERS: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """Normalise one row; with ADDS, the sum of a row of x, one of residual, and a bias `added`."""
    row = tl.program_id(0).to(tl.int64)
    columns = tl.arange(0, BLOCK)
    inside = columns < width
    x = tl.load(x_ptr + row * width + columns, mask=inside, other=0.0).to(tl.float32)
    if ADDS:
        if HAS_ADDED_BIAS:
            x += tl.load(added_ptr + columns, mask=inside, other=0.0).to(tl.float32)
        x += tl.load(residual_ptr + row * width + columns, mask=inside, other=0.0).to(tl.float32)
        rounded = x.to(sum_ptr.dtype.element_ty)
        tl.store(sum_ptr + row * width + columns, rounded, mask=inside)
        x = rounded.to(tl.float32)  # what backward reads
    if CENTERS:
        mean = tl.sum(x) / width
        tl.store(mean_ptr + row, mean)
        x = tl.where(inside, x - mean, 0.0)
    rstd = tl.rsqrt(tl.sum(x * x) / width + eps)
    tl.store(rstd_ptr + row, rstd)
    y = x * rstd * tl.load(weight_ptr + columns, mask=inside, other=0.0).to(tl.float32)
    if CENTERS:
        y += tl.load(bias_ptr + columns, mask=inside, other=0.0).to(tl.float32)
    tl.store(out_ptr + row * width + columns, y.to(out_ptr.dtype.element_ty), mask=inside)


@triton.jit
def backward_kernel(
    x_ptr, grad_ptr, grad_sum_ptr, weight_ptr, mean_ptr, rstd_ptr, grad_x_ptr, weight_sums_ptr,
    bias_sums_ptr, num_rows, width, ADDS: tl.constexpr, CENTERS: tl.constexpr, SUMS: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """Compute the gradient of every num_programs-th row, and with SUMS the sums over them.

    With ADDS, x is a sum that has a gradient of its own.
    """
    columns = tl.arange(0, BLOCK)
    inside = columns < width
    weight = tl.load(weight_ptr + columns, mask=inside, other=0.0).to(tl.float32)
    if SUMS:
        weight_sum = tl.zeros((BLOCK,), tl.float32)
        bias_sum = tl.zeros((BLOCK,), tl.float32)
    for row in range(tl.program_id(0), num_rows, tl.num_programs(0)):
        begin = row * tl.cast(width, tl.int64)
        x = tl.load(x_ptr + begin + columns, mask=inside, other=0.0).to(tl.float32)
        grad = tl.load(grad_ptr + begin + columns, mask=inside, other=0.0).to(tl.float32)
        rstd = tl.load(rstd_ptr + row)
        if CENTERS:
            x = tl.where(inside, x - tl.load(mean_ptr + row), 0.0)
        x = x * rstd
        if SUMS:
            weight_sum += grad * x
            if CENTERS:
                bias_sum += grad
        grad = grad * weight
        along = tl.sum(grad * x) / width
        if CENTERS:
            grad = grad - tl.sum(grad) / width
        grad = (grad - x * along) * rstd
        if ADDS:
            grad += tl.load(grad_sum_ptr + begin + columns, mask=inside, other=0.0).to(tl.float32)
        tl.store(grad_x_ptr + begin + columns, grad.to(grad_x_ptr.dtype.element_ty), mask=inside)
    if SUMS:
        begin = tl.program_id(0) * width
        tl.store(weight_sums_ptr + begin + columns, weight_sum, mask=inside)
        if CENTERS:
            tl.store(bias_sums_ptr + begin + columns, bias_sum, mask=inside)


@triton.jit
def sums_kernel(
    x_ptr, grad_ptr, mean_ptr, rstd_ptr, weight_sums_ptr, bias_sums_ptr, num_rows, width,
    rows_per_program, CENTERS: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """Sum the gradients of weight and bias over a run of rows, for some columns."""
    columns = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    begin = tl.program_id(1) * rows_per_program
    end = tl.minimum(begin + rows_per_program, num_rows)
    weight_sum = tl.zeros((COLUMNS,), tl.float32)
    bias_sum = tl.zeros((COLUMNS,), tl.float32)
    for first in range(begin, end, ROWS):
        rows = first + tl.arange(0, ROWS)
        there = rows < end
        inside = there[:, None] & (columns < width)[None, :]
        place = rows.to(tl.int64)[:, None] * width + columns[None, :]
        x = tl.load(x_ptr + place, mask=inside, other=0.0).to(tl.float32)
        grad = tl.load(grad_ptr + place, mask=inside, other=0.0).to(tl.float32)
        if CENTERS:
            x -= tl.load(mean_ptr + rows, mask=there, other=0.0)[:, None]
            bias_sum += tl.sum(grad, 0)
        x *= tl.load(rstd_ptr + rows, mask=there, other=0.0)[:, None]
        weight_sum += tl.sum(grad * x, 0)
    place = tl.program_id(1) * width + columns
    tl.store(weight_sums_ptr + place, weight_sum, mask=columns < width)
    if CENTERS:
        tl.store(bias_sums_ptr + place, bias_sum, mask=columns < width)


class _Norm(torch.autograd.Function):
    """x [t, h], weight [h], bias [h] or None for RMSNorm -> [t, h]; keeps x and a number a row."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, eps: float) -> Tensor:
        weight = weight.contiguous()
        out, mean, rstd = _normalize(x, None, None, x, weight, bias, eps)
        ctx.save_for_backward(x, weight, bias, mean, rstd)
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        return *_gradients(ctx.saved_tensors, grad, None), None


class _AddedNorm(torch.autograd.Function):
    """x and residual [t, h], added bias [h] or None, and as `_Norm` -> sum and norm [t, h]."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, residual: Tensor, added: Tensor | None, weight: Tensor,
        bias: Tensor | None, eps: float,
    ) -> tuple[Tensor, Tensor]:  # fmt: skip
        weight, total = weight.contiguous(), torch.empty_like(residual)
        out, mean, rstd = _normalize(x, residual, added, total, weight, bias, eps)
        ctx.save_for_backward(total, weight, bias, mean, rstd)
        ctx.added_dtype = None if added is None else added.dtype
        return total, out

    @staticmethod
    def backward(ctx: Any, grad_sum: Tensor, grad: Tensor) -> tuple[Tensor | None, ...]:
        grad_x, *others = _gradients(ctx.saved_tensors, grad, grad_sum)
        grad_added = None if ctx.added_dtype is None else grad_x.sum(0).to(ctx.added_dtype)
        return grad_x, grad_x, grad_added, *others, None


def _normalize(
    x: Tensor, residual: Tensor | None, added: Tensor | None, total: Tensor, weight: Tensor,
    bias: Tensor | None, eps: float,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """Return the norm [t, h] of x, or of the sum that is written to `total`, and its statistics."""
    num_rows, width = x.shape
    out = torch.empty_like(x)
    statistics = torch.empty((2, num_rows), dtype=torch.float32, device=x.device)
    mean, rstd = statistics[0], statistics[1]
    forward_kernel[(num_rows,)](
        x, x if residual is None else residual, x if added is None else added.contiguous(), weight,
        weight if bias is None else bias.contiguous(), total, out, mean, rstd, width, eps,
        ADDS=residual is not None, HAS_ADDED_BIAS=added is not None, CENTERS=bias is not None,
        **launch_of(width),
    )  # fmt: skip
    return out, mean, rstd


def _gradients(
    saved: tuple[Tensor, ...], grad: Tensor, grad_sum: Tensor | None
) -> tuple[Tensor, Tensor, Tensor | None]:
    """Return the gradients of x [t, h], or of the sum that is normed, of weight and bias [h].

    Args:
        grad_sum: [t, h], gradient of the sum through the residual, in addition to the norm's.
    """
    x, weight, bias, mean, rstd = saved
    num_rows, width = x.shape
    grad, centers = grad.contiguous(), bias is not None
    grad_x, fused = torch.empty_like(x), width <= WIDEST_FUSED
    programs = min(num_rows, MAX_PROGRAMS) if fused else 16
    sums = x.new_empty((2 if centers else 1, programs, width), dtype=torch.float32)
    backward_kernel[(programs if fused else num_rows,)](
        x, grad, grad if grad_sum is None else grad_sum.contiguous(), weight, mean, rstd, grad_x,
        sums[0], sums[-1], num_rows, width, ADDS=grad_sum is not None, CENTERS=centers, SUMS=fused,
        **backward_launch_of(width, grad_sum is not None),
    )  # fmt: skip
    if not fused:
        sums_kernel[(triton.cdiv(width, SUM_COLUMNS), programs)](
            x, grad, mean, rstd, sums[0], sums[-1], num_rows, width,
            triton.cdiv(num_rows, programs),
            CENTERS=centers, ROWS=SUM_ROWS, COLUMNS=SUM_COLUMNS, num_warps=4,
        )  # fmt: skip
    totals = sums.sum(1)
    grad_bias = totals[1].to(bias.dtype) if centers else None
    return grad_x, totals[0].to(weight.dtype), grad_bias


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Return x / sqrt(mean(x^2) + eps) * weight of x [..., h], weight [h]."""
    if x.shape[-1] > WIDEST or not x.numel():
        return plain.torch_rms_norm(x, weight, eps)
    return _Norm.apply(x.reshape(-1, x.shape[-1]), weight, None, eps).view(x.shape)


def layer_norm(x: Tensor, weight: Tensor, bias: Tensor, eps: float) -> Tensor:
    """Return (x - mean) / sqrt(var + eps) * weight + bias of x [..., h], weight and bias [h]."""
    if x.shape[-1] > WIDEST or not x.numel():
        return plain.torch_layer_norm(x, weight, bias, eps)
    return _Norm.apply(x.reshape(-1, x.shape[-1]), weight, bias, eps).view(x.shape)


def added_norm(
    norm: plain.NormFunction, x: Tensor, bias: Tensor | None, residual: Tensor,
    parameters: tuple[Tensor, ...], eps: float,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Return residual + x + bias and its norm, of x and residual [..., h]; see `plain.AddedNorm`.

    RMSNorm has a weight [h] as parameters, LayerNorm weight and bias.
    """
    width = x.shape[-1]
    if width > WIDEST_ADDED or not x.numel():
        return plain.added_norm_apart(norm, x, bias, residual, parameters, eps)
    rows = x.reshape(-1, width), residual.reshape(-1, width)
    weight, norm_bias = parameters if len(parameters) == 2 else (parameters[0], None)
    total, normed = _AddedNorm.apply(*rows, bias, weight, norm_bias, eps)
    return total.view(residual.shape), normed.view(x.shape)
