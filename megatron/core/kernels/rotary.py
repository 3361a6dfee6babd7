"""The tables of rotary embedding: of whole heads, and of the rotary part of latent attention.

J. Su et al., "RoFormer: Enhanced Transformer with Rotary Position Embedding", section 3.2.2,
arXiv 2104.09864. YaRN and other extensions change the angles only: kernels receive cosines and
sines.

Legend: s sequence, b micro batch, n heads, r rotated channels; of latent attention d channels of a
head without position and p with it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeAlias

import torch
from torch import Tensor

from megatron.core.kernels import triton_kernels
from megatron.core.kernels.registry import OTHER_DEVICES, Kernel, KernelTable

Rotation: TypeAlias = Callable[[Tensor, Tensor, Tensor, bool], Tensor]
"""(x [s, b, ..., w], cos and sin [s, 1 or b, ..., r] with dimensions of 1 for heads, interleaved)
-> [s, b, ..., w]; the first r channels rotate."""
LatentRotation: TypeAlias = Callable[
    [Tensor, Tensor, Tensor, Tensor, Tensor, bool], tuple[Tensor, Tensor]
]
"""(query [s, b, n, d+p], key [s, b, n, d], rotary key of all heads [s, b, p], cos and sin
[s, 1 or b, 1, p], interleaved) -> query and key [s, b, n, d+p], the last p channels rotated."""


def passes_of_rotation(x: Tensor, cos: Tensor, sin: Tensor, interleaved: bool) -> Tensor:
    """Rotate x [s, b, ..., w] in three passes over the data; see `Rotation`."""
    cos, sin = cos.to(x.dtype), sin.to(x.dtype)
    if not torch.is_grad_enabled():
        return _rotated(x, cos, sin, interleaved, 1)
    return _Rotation.apply(x, cos, sin, interleaved)


class _Rotation(torch.autograd.Function):
    """The gradient is the rotation by the opposite angle."""

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
            # `narrow` is much cheaper than `chunk`, which matters for a single row.
            target = out.narrow(-1, half * width, width)
            other = x.narrow(-1, (1 - half) * width, width)
            angle = sin.narrow(-1, half * width, width)
        target.addcmul_(other, angle, value=sign)
    return full


def joined_latent_rotation(
    query: Tensor, key: Tensor, shared_key: Tensor, cos: Tensor, sin: Tensor, interleaved: bool
) -> tuple[Tensor, Tensor]:
    """Rotate query [s, b, n, d+p] and join key [s, b, n, d+p]; see `LatentRotation`."""
    d, p = key.shape[-1], shared_key.shape[-1]
    rotated = passes_of_rotation(query[..., d:], cos, sin, interleaved)
    shared_key = passes_of_rotation(shared_key.unsqueeze(2), cos, sin, interleaved)
    query = torch.cat((query[..., :d], rotated), -1)
    return query, torch.cat((key, shared_key.expand(*key.shape[:-1], p)), -1)


_PASSES = Kernel("passes", passes_of_rotation)
_JOINED = Kernel("passes", joined_latent_rotation)

ROTARY: KernelTable[Rotation] = KernelTable(
    "rotary embedding",
    {
        "cpu": (_PASSES,),
        OTHER_DEVICES: (triton_kernels.entry("rotary", "rotation"), _PASSES),
    },
)
LATENT_ROTARY: KernelTable[LatentRotation] = KernelTable(
    "rotary embedding of latent attention",
    {
        "cpu": (_JOINED,),
        OTHER_DEVICES: (triton_kernels.entry("rotary", "latent_rotation"), _JOINED),
    },
)
UNFUSED = ("passes",)
"""Kernels that `--no-rope-fusion` prefers."""
