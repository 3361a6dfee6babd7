"""Rotary position embedding: rotate pairs of channels of queries and keys by position.

J. Su et al., "RoFormer: Enhanced Transformer with Rotary Position Embedding", section 3.2.2,
arXiv 2104.09864.

Legend: s sequence, b micro-batch, n heads, d head dim, r rotated channels (r <= d).
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


def cos_sin(freqs: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Return cosine and sine of the angles [s, 1, 1, r], computed in fp32, in `dtype`."""
    return freqs.float().cos().to(dtype), freqs.float().sin().to(dtype)


def rotate(x: Tensor, cos: Tensor, sin: Tensor, interleaved: bool = False) -> Tensor:
    """Rotate the first r channels of x [s, b, n, d]; the others pass unchanged.

    Args:
        cos, sin: [s, 1, 1, r]; entry i belongs to channel i, so each angle appears twice.
        interleaved: pairs are channels (2i, 2i+1) instead of (i, i + r/2).
    """
    cos, sin = cos.to(x.dtype), sin.to(x.dtype)
    if not torch.is_grad_enabled():
        return _rotated(x, cos, sin, interleaved, 1)
    return _Rotation.apply(x, cos, sin, interleaved)


class _Rotation(torch.autograd.Function):
    """Three passes over the data; the gradient is the rotation by the opposite angle."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, cos: Tensor, sin: Tensor, interleaved: bool) -> Tensor:
        ctx.save_for_backward(cos, sin)
        ctx.interleaved = interleaved
        return _rotated(x, cos, sin, interleaved, 1)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None]:
        cos, sin = ctx.saved_tensors
        return _rotated(grad, cos, sin, ctx.interleaved, -1), None, None, None


def _rotated(x: Tensor, cos: Tensor, sin: Tensor, interleaved: bool, direction: int) -> Tensor:
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    rotated = cos.shape[-1]
    if rotated < x.shape[-1]:
        out[..., rotated:] = x[..., rotated:]
        x, full, out = x[..., :rotated], out, out[..., :rotated]
    else:
        full = out
    torch.mul(x, cos, out=out)
    width = rotated // 2
    for half in range(2):
        # first' = first cos - second sin;  second' = second cos + first sin
        sign = direction if half else -direction
        if interleaved:
            target, other, angle = out[..., half::2], x[..., 1 - half :: 2], sin[..., half::2]
        else:
            # `narrow` costs a fraction of `chunk`, which shows where a row is all there is.
            target = out.narrow(-1, half * width, width)
            other = x.narrow(-1, (1 - half) * width, width)
            angle = sin.narrow(-1, half * width, width)
        target.addcmul_(other, angle, value=sign)
    return full
