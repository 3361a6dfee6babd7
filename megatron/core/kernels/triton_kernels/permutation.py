"""Copies of tokens in the order of their experts, and sums of copies, without atomic additions.

A sort on the device lists the copies of each token, once per permutation. Forward and backward then
gather one row per copy, or sum the copies of a token in fp32 and in a fixed order. The host reads
no count.

Legend: t tokens, h hidden, e experts, n copies: one for each expert of each token.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeAlias

import torch
import triton
import triton.language as tl
from torch import Tensor

COLUMNS = 1024
"""Columns of a program: eight elements per thread."""
NUM_WARPS = 4


@triton.jit
def gather_kernel(x_ptr, source_ptr, out_ptr, width, COLUMNS: tl.constexpr):
    """Copy some columns of the source of a row."""
    row = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    inside = columns < width
    source = tl.load(source_ptr + row).to(tl.int64)
    x = tl.load(x_ptr + source * width + columns, mask=inside, other=0.0)
    tl.store(out_ptr + row * width + columns, x, mask=inside)


@triton.jit
def sum_kernel(x_ptr, order_ptr, begins_ptr, out_ptr, width, COLUMNS: tl.constexpr):
    """Sum some columns of the copies of a token."""
    token = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    inside = columns < width
    total = tl.zeros((COLUMNS,), tl.float32)
    for place in range(tl.load(begins_ptr + token), tl.load(begins_ptr + token + 1)):
        row = tl.load(order_ptr + place).to(tl.int64)
        total += tl.load(x_ptr + row * width + columns, mask=inside, other=0.0).to(tl.float32)
    tl.store(out_ptr + token * width + columns, total.to(out_ptr.dtype.element_ty), mask=inside)


def gather(x: Tensor, source: Tensor) -> Tensor:
    """Return row source[i] of x [., h] as row i."""
    x = x.contiguous()
    out = x.new_empty((len(source), x.shape[1]))
    gather_kernel[(len(source), triton.cdiv(x.shape[1], COLUMNS))](
        x, source, out, x.shape[1], COLUMNS=COLUMNS, num_warps=NUM_WARPS
    )
    return out


Rows: TypeAlias = Callable[[Tensor], Tensor]


class _LinearMap(torch.autograd.Function):
    """rows [n, h] -> apply(rows); backward applies the adjoint map."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, apply: Rows, adjoint: Rows) -> Tensor:
        ctx.adjoint = adjoint
        return apply(rows)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        return ctx.adjoint(grad), None, None


class _Weights(torch.autograd.Function):
    """probs [t, e] -> [n]; no element is taken twice, so gradients are stored, not added."""

    @staticmethod
    def forward(ctx: Any, probs: Tensor, token: Tensor, expert: Tensor) -> Tensor:
        ctx.save_for_backward(token, expert)
        ctx.shape = probs.shape
        return probs[token, expert]

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        return grad.new_zeros(ctx.shape).index_put_(ctx.saved_tensors, grad), None, None


class SortedPermutation:
    """See `kernels.permutation.Permutation`.

    Args:
        expert, token: int64 [n], of each row; num_tokens: t.
    """

    def __init__(self, expert: Tensor, token: Tensor, num_tokens: int) -> None:
        self.expert, self.token, self.num_tokens = expert, token, num_tokens
        of_rows, self.order = token.sort(stable=True)
        tokens = torch.arange(num_tokens + 1, device=token.device)
        self.begins = torch.searchsorted(of_rows, tokens)

    def copies(self, tokens: Tensor) -> Tensor:
        """Return [n, h], the token of each row of [t, h], without autograd."""
        return gather(tokens, self.token)

    def sums(self, rows: Tensor) -> Tensor:
        """Return [t, h], the sums of rows [n, h], without autograd."""
        rows = rows.contiguous()
        out = rows.new_empty((self.num_tokens, rows.shape[1]))
        sum_kernel[(self.num_tokens, triton.cdiv(rows.shape[1], COLUMNS))](
            rows, self.order, self.begins, out, rows.shape[1], COLUMNS=COLUMNS, num_warps=NUM_WARPS
        )
        return out

    def permute(self, tokens: Tensor) -> Tensor:
        """Return [n, h] of [t, h]."""
        return _LinearMap.apply(tokens, self.copies, self.sums)

    def weights(self, probs: Tensor, first_expert: int = 0) -> Tensor:
        """Return [n] of [t, e]."""
        return _Weights.apply(probs, self.token, self.expert + first_expert)

    def unpermute(self, rows: Tensor) -> Tensor:
        """Return [t, h] of [n, h]."""
        return _LinearMap.apply(rows, self.sums, self.copies)
