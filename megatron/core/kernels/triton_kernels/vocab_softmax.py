"""Cross entropy of the columns of a rank: two passes over logits, 6 bytes an element in bf16.

The first finds the highest logit of each row, the sum of exponentials relative to it and the logit
of the label (M. Milakov, N. Gimelshein, "Online normalizer calculation for softmax", section 3,
arXiv 1805.02867). The second reads the logits once more and writes their gradient, which may be in
their place.

Shapes: `r` rows, `c` columns.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from megatron.core.kernels.vocab_softmax import RowStatistics, Targets

COLUMNS = 2048
"""Columns that a program takes at a time: 16 bytes of bf16 for each thread."""
NUM_WARPS = 8

# Both kernels mask loads by the padded width, since the count of ids may be odd and threads would
# then load single elements.


@triton.jit
def statistics_kernel(
    logits_ptr, label_ptr, is_local_ptr, highest_ptr, log_sum_ptr, label_logit_ptr, sums_ptr,
    width, valid, stride, HAS_SUMS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """Read one row. Each lane has a highest logit and a sum of its own, joined at the end."""
    row = tl.program_id(0).to(tl.int64)
    lanes = tl.arange(0, COLUMNS)
    # Finite, so that the difference of an empty lane to itself is zero.
    highest = tl.full((COLUMNS,), -3.0e38, tl.float32)
    total = tl.zeros((COLUMNS,), tl.float32)
    logit_sum = tl.zeros((COLUMNS,), tl.float32)
    for first in range(0, width, COLUMNS):
        columns = first + lanes
        x = tl.load(logits_ptr + row * stride + columns, mask=columns < width, other=0.0)
        is_id = columns < valid
        x = tl.where(is_id, x.to(tl.float32), -float("inf"))
        joined = tl.maximum(highest, x)
        total = total * tl.exp(highest - joined) + tl.exp(x - joined)
        highest = joined
        if HAS_SUMS:
            logit_sum += tl.where(is_id, x, 0.0)
    top = tl.max(highest)
    tl.store(highest_ptr + row, top)
    tl.store(log_sum_ptr + row, tl.log(tl.sum(total * tl.exp(highest - top))))
    label, is_local = tl.load(label_ptr + row), tl.load(is_local_ptr + row)
    label_logit = tl.load(logits_ptr + row * stride + label, mask=is_local, other=0.0)
    tl.store(label_logit_ptr + row, label_logit.to(tl.float32))
    if HAS_SUMS:
        tl.store(sums_ptr + row, tl.sum(logit_sum))


@triton.jit
def gradient_kernel(
    logits_ptr, out_ptr, highest_ptr, log_sum_ptr, scale_ptr, label_ptr, is_local_ptr,
    width, valid, stride, out_stride, on_label, uniform,
    HAS_SCALE: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """Write some columns of one row; the result may be in place of the logits."""
    row = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    inside = columns < width
    x = tl.load(logits_ptr + row * stride + columns, mask=inside, other=0.0).to(tl.float32)
    y = tl.exp(x - tl.load(highest_ptr + row) - tl.load(log_sum_ptr + row)) - uniform
    label = tl.where(tl.load(is_local_ptr + row), tl.load(label_ptr + row), -1)
    y = tl.where(columns == label, y - on_label, y)
    if HAS_SCALE:
        y *= tl.load(scale_ptr + row)
    y = tl.where(columns < valid, y, 0.0)
    tl.store(out_ptr + row * out_stride + columns, y.to(out_ptr.dtype.element_ty), mask=inside)


class KeptLogits:
    """The logits stay as they are until the gradient is written; see `LogitRows`."""

    def measure(self, logits: Tensor, targets: Targets, local: Tensor, *, in_place: bool) -> None:
        """See `LogitRows`; [r, c] -> [3 or 4, r]."""
        statistics_kernel[(len(logits),)](
            logits, targets.columns, targets.is_local, local[0], local[1], local[2], local[-1],
            logits.shape[1], targets.num_valid, logits.stride(0),
            HAS_SUMS=len(local) > 3, COLUMNS=COLUMNS, num_warps=NUM_WARPS,
        )  # fmt: skip

    def gradient(
        self,
        rows: Tensor,
        out: Tensor,
        statistics: RowStatistics,
        targets: Targets,
        scale: Tensor | None,
    ) -> None:
        """See `LogitRows`; [r, c]."""
        # Autograd must detect the change if the operation that made the logits needs them.
        torch.autograd.graph.increment_version(out)
        width, highest = rows.shape[1], statistics.highest
        gradient_kernel[(len(rows), triton.cdiv(width, COLUMNS))](
            rows, out, highest, statistics.log_sum, highest if scale is None else scale,
            targets.columns, targets.is_local, width, targets.num_valid,
            rows.stride(0), out.stride(0), targets.on_label, targets.uniform,
            HAS_SCALE=scale is not None, COLUMNS=COLUMNS, num_warps=NUM_WARPS,
        )  # fmt: skip
