"""Softmax over the columns of a rank without fp32 logits in memory.

One pass finds the highest logit of each row and the sum of exponentials relative to it (M. Milakov,
N. Gimelshein, "Online normalizer calculation for softmax", section 3, arXiv 1805.02867); where the
softmax is wanted, a second one writes it in the logits' own dtype, times a number for each row.

Shapes: `r` rows, `c` columns.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

COLUMNS = 1024
"""Columns that a program takes at a time."""
NUM_WARPS = 8


@triton.jit
def statistics_kernel(
    logits_ptr, highest_ptr, log_sum_ptr, sums_ptr, width, stride,
    HAS_SUMS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """Read one row. Each lane has a highest logit and a sum of its own, joined at the end."""
    row = tl.program_id(0).to(tl.int64)
    lanes = tl.arange(0, COLUMNS)
    # Finite: a lane that has seen nothing has a difference of zero to itself.
    highest = tl.full((COLUMNS,), -3.0e38, tl.float32)
    total = tl.zeros((COLUMNS,), tl.float32)
    logit_sum = tl.zeros((COLUMNS,), tl.float32)
    for first in range(0, width, COLUMNS):
        inside = first + lanes < width
        x = tl.load(logits_ptr + row * stride + first + lanes, mask=inside, other=-float("inf"))
        x = x.to(tl.float32)
        joined = tl.maximum(highest, x)
        total = total * tl.exp(highest - joined) + tl.exp(x - joined)
        highest = joined
        if HAS_SUMS:
            logit_sum += tl.where(inside, x, 0.0)
    top = tl.max(highest)
    tl.store(highest_ptr + row, top)
    tl.store(log_sum_ptr + row, tl.log(tl.sum(total * tl.exp(highest - top))))
    if HAS_SUMS:
        tl.store(sums_ptr + row, tl.sum(logit_sum))


@triton.jit
def softmax_kernel(
    logits_ptr, highest_ptr, log_sum_ptr, factors_ptr, out_ptr, width, stride, out_stride,
    HAS_FACTORS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """Write some columns of one row; the result may be in place of the logits."""
    row = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    inside = columns < width
    x = tl.load(logits_ptr + row * stride + columns, mask=inside, other=0.0).to(tl.float32)
    y = tl.exp(x - tl.load(highest_ptr + row) - tl.load(log_sum_ptr + row))
    if HAS_FACTORS:
        y *= tl.load(factors_ptr + row)
    tl.store(out_ptr + row * out_stride + columns, y.to(out_ptr.dtype.element_ty), mask=inside)


def row_softmax(
    logits: Tensor, out: Tensor | None, factors: Tensor | None, sums: Tensor | None
) -> tuple[Tensor, Tensor]:
    """Return the highest logit [r] and the log of the sum relative to it [r] of logits [r, c].

    Args:
        out: [r, c] receives the softmax times `factors` [r] (None: 1); None: not wanted.
        sums: [r] receives the sum of the logits, or None.
    """
    rows, width = logits.shape
    statistics = torch.empty((2, rows), dtype=torch.float32, device=logits.device)
    highest, log_sum = statistics[0], statistics[1]
    statistics_kernel[(rows,)](
        logits, highest, log_sum, highest if sums is None else sums, width, logits.stride(0),
        HAS_SUMS=sums is not None, COLUMNS=COLUMNS, num_warps=NUM_WARPS,
    )  # fmt: skip
    if out is not None:
        softmax_kernel[(rows, triton.cdiv(width, COLUMNS))](
            logits, highest, log_sum, highest if factors is None else factors, out, width,
            logits.stride(0), out.stride(0),
            HAS_FACTORS=factors is not None, COLUMNS=COLUMNS, num_warps=NUM_WARPS,
        )  # fmt: skip
    return highest, log_sum
