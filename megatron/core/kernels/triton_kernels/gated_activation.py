"""act(gate + bias) * (up + bias) * weight, of one packed tensor, forward and backward.

Every element is read and written once; backward recomputes the activation. (GLU Variants, arXiv
2002.05202; the weight of a row is the routing weight of an expert's token.)

Shapes: `t` rows, `f` width; packed is [t, 2f], gate first.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
import triton
import triton.language as tl
from torch import Tensor

from megatron.core import activations
from megatron.core.kernels.gated_activation import Act, Gate

COLUMNS = 1024
"""Columns of a program: eight elements of each tensor per thread."""
NUM_WARPS = 4
KINDS: dict[Act, int] = {F.silu: 0, activations.quick_gelu: 1, activations.fast_gelu: 2}
_QUICK, _TANH = tl.constexpr(1), tl.constexpr(2)


@triton.jit
def _act(x, KIND: tl.constexpr):
    """Return the activation of x and its derivative."""
    if KIND == _TANH:
        # tanh(u) = 2 sigmoid(2u) - 1, with u = sqrt(2 / pi) (x + 0.044715 x^3).
        slope = 0.7978845608028654 * (1.0 + 0.134145 * x * x)
        share = tl.sigmoid(1.5957691216057308 * (x + 0.044715 * x * x * x))
        return x * share, share + x * 2.0 * slope * share * (1.0 - share)
    factor: tl.constexpr = 1.702 if KIND == _QUICK else 1.0
    share = tl.sigmoid(factor * x)
    return x * share, share + factor * x * share * (1.0 - share)


@triton.jit
def _gate_and_up(packed_ptr, bias_ptr, columns, width, HAS_BIAS: tl.constexpr):
    """Load some columns of a row's gate and of its up projection, fp32, with the bias added."""
    inside = columns < width
    gate = tl.load(packed_ptr + columns, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(packed_ptr + width + columns, mask=inside, other=0.0).to(tl.float32)
    if HAS_BIAS:
        gate += tl.load(bias_ptr + columns, mask=inside, other=0.0).to(tl.float32)
        up += tl.load(bias_ptr + width + columns, mask=inside, other=0.0).to(tl.float32)
    return gate, up


@triton.jit
def forward_kernel(
    packed_ptr, bias_ptr, weights_ptr, out_ptr, width,
    KIND: tl.constexpr, HAS_BIAS: tl.constexpr, HAS_WEIGHTS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """Compute some columns of a row."""
    row = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    inside = columns < width
    gate, up = _gate_and_up(packed_ptr + row * 2 * width, bias_ptr, columns, width, HAS_BIAS)
    activated, _ = _act(gate, KIND)
    y = activated * up
    if HAS_WEIGHTS:
        y *= tl.load(weights_ptr + row).to(tl.float32)
    tl.store(out_ptr + row * width + columns, y.to(out_ptr.dtype.element_ty), mask=inside)


@triton.jit
def backward_kernel(
    packed_ptr, bias_ptr, weights_ptr, grad_ptr, grad_packed_ptr, weight_sums_ptr, width,
    KIND: tl.constexpr, HAS_BIAS: tl.constexpr, HAS_WEIGHTS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """Compute the gradients of some columns of a row, and their part of its weight's gradient."""
    row = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    inside = columns < width
    gate, up = _gate_and_up(packed_ptr + row * 2 * width, bias_ptr, columns, width, HAS_BIAS)
    grad = tl.load(grad_ptr + row * width + columns, mask=inside, other=0.0).to(tl.float32)
    activated, slope = _act(gate, KIND)
    if HAS_WEIGHTS:
        weight_sum = tl.sum(grad * activated * up)
        tl.store(weight_sums_ptr + row * tl.num_programs(1) + tl.program_id(1), weight_sum)
        grad *= tl.load(weights_ptr + row).to(tl.float32)
    grad_gate, grad_up = grad * up * slope, grad * activated
    out = grad_packed_ptr + row * 2 * width + columns
    tl.store(out, grad_gate.to(grad_packed_ptr.dtype.element_ty), mask=inside)
    tl.store(out + width, grad_up.to(grad_packed_ptr.dtype.element_ty), mask=inside)


class _Gated(torch.autograd.Function):
    """packed [t, 2f], bias [2f] or None, weights [t] or None -> [t, f]; keeps its inputs."""

    @staticmethod
    def forward(
        ctx: Any, packed: Tensor, bias: Tensor | None, weights: Tensor | None, kind: int
    ) -> Tensor:
        rows, width = packed.shape[0], packed.shape[1] // 2
        out = packed.new_empty((rows, width))
        forward_kernel[(rows, triton.cdiv(width, COLUMNS))](
            packed, packed if bias is None else bias, packed if weights is None else weights, out,
            width, KIND=kind, HAS_BIAS=bias is not None, HAS_WEIGHTS=weights is not None,
            COLUMNS=COLUMNS, num_warps=NUM_WARPS,
        )  # fmt: skip
        ctx.save_for_backward(packed, bias, weights)
        ctx.kind = kind
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        packed, bias, weights = ctx.saved_tensors
        rows, width = packed.shape[0], packed.shape[1] // 2
        blocks = triton.cdiv(width, COLUMNS)
        grad_packed = torch.empty_like(packed)
        sums = packed.new_empty((rows, blocks) if weights is not None else 1, dtype=torch.float32)
        backward_kernel[(rows, blocks)](
            packed, packed if bias is None else bias, packed if weights is None else weights,
            grad.contiguous(), grad_packed, sums, width, KIND=ctx.kind, HAS_BIAS=bias is not None,
            HAS_WEIGHTS=weights is not None, COLUMNS=COLUMNS, num_warps=NUM_WARPS,
        )  # fmt: skip
        grad_bias = None if bias is None else grad_packed.sum(0).to(bias.dtype)
        grad_weights = None if weights is None else sums.sum(1).to(weights.dtype)
        return grad_packed, grad_bias, grad_weights, None


def gate_of(
    packed: Tensor, gate: Gate, bias: Tensor | None = None, weights: Tensor | None = None
) -> Tensor:
    """Return act(gate + bias) * (up + bias) * weights of packed [..., 2f] as [..., f].

    Args:
        bias: [2f] or None. weights: [...], one for each row, or None.
    """
    flat = packed.reshape(-1, packed.shape[-1]).contiguous()
    flat_weights = None if weights is None else weights.reshape(-1).contiguous()
    bias = None if bias is None else bias.contiguous()
    out = _Gated.apply(flat, bias, flat_weights, KINDS[gate.act])
    return out.view(*packed.shape[:-1], packed.shape[-1] // 2)
