"""Rotary embedding of heads in one pass, forward and backward.

A program rotates the channels of some heads of one token in fp32 and copies the other channels. The
gradient is the rotation by the opposite angle. Cosines and sines are read for one channel of each
pair.

Legend: s sequence, b micro batch, n heads, w channels of a head, r rotated channels; in latent
attention d channels without a position and p channels with a position.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

ELEMENTS = 2048
"""Most elements of a program's tile: 16 of each thread."""
NUM_WARPS = 4


@triton.jit
def _load_pairs(ptr, rows, there, pairs, INTERLEAVED: tl.constexpr, HEADS: tl.constexpr,
                PAIRS: tl.constexpr):  # fmt: skip
    """Return first and second channels of pairs, fp32 [HEADS, PAIRS] each: (2i, 2i+1), or
    (i, i + pairs) of rows that begin `rows` [HEADS] elements after ptr."""
    if INTERLEAVED:
        channel = tl.arange(0, 2 * PAIRS)
        inside = there[:, None] & (channel < 2 * pairs)[None, :]
        x = tl.load(ptr + rows[:, None] + channel[None, :], mask=inside, other=0.0)
        first, second = tl.split(tl.reshape(x.to(tl.float32), (HEADS, PAIRS, 2)))
    else:
        pair = tl.arange(0, PAIRS)
        inside = there[:, None] & (pair < pairs)[None, :]
        place = ptr + rows[:, None] + pair[None, :]
        first = tl.load(place, mask=inside, other=0.0).to(tl.float32)
        second = tl.load(place + pairs, mask=inside, other=0.0).to(tl.float32)
    return first, second


@triton.jit
def _store_pairs(ptr, rows, there, pairs, first, second, INTERLEAVED: tl.constexpr,
                 HEADS: tl.constexpr, PAIRS: tl.constexpr):  # fmt: skip
    """Store what `_load_pairs` returns."""
    if INTERLEAVED:
        channel = tl.arange(0, 2 * PAIRS)
        inside = there[:, None] & (channel < 2 * pairs)[None, :]
        x = tl.reshape(tl.join(first, second), (HEADS, 2 * PAIRS)).to(ptr.dtype.element_ty)
        tl.store(ptr + rows[:, None] + channel[None, :], x, mask=inside)
    else:
        pair = tl.arange(0, PAIRS)
        inside = there[:, None] & (pair < pairs)[None, :]
        place = ptr + rows[:, None] + pair[None, :]
        tl.store(place, first.to(ptr.dtype.element_ty), mask=inside)
        tl.store(place + pairs, second.to(ptr.dtype.element_ty), mask=inside)


@triton.jit
def _turned(first, second, cos_ptr, sin_ptr, pairs, direction, INTERLEAVED: tl.constexpr,
            PAIRS: tl.constexpr):  # fmt: skip
    """Rotate pairs [HEADS, PAIRS] by the angles of one token."""
    pair = tl.arange(0, PAIRS)
    place = pair * 2 if INTERLEAVED else pair
    cos = tl.load(cos_ptr + place, mask=pair < pairs, other=0.0).to(tl.float32)[None, :]
    sin = tl.load(sin_ptr + place, mask=pair < pairs, other=0.0).to(tl.float32)[None, :]
    sin *= direction
    return first * cos - second * sin, second * cos + first * sin


@triton.jit
def rotation_kernel(
    x_ptr, cos_ptr, sin_ptr, out_ptr, x_s, x_b, x_group, x_n, cos_s, cos_b,
    batch, heads, heads_per_group, width, first, pairs, direction,
    INTERLEAVED: tl.constexpr, HEADS: tl.constexpr, PAIRS: tl.constexpr, REST: tl.constexpr,
):  # fmt: skip
    """Rotate channels first ... first + 2 pairs - 1 of some heads of a token, copy the others.

    out: [s, b, n, w], contiguous. REST: 0 if all channels rotate.
    """
    token = tl.program_id(0).to(tl.int64)
    s, b = token // batch, token % batch
    head = tl.program_id(1) * HEADS + tl.arange(0, HEADS)
    there = head < heads
    rows = s * x_s + b * x_b + head // heads_per_group * x_group + head % heads_per_group * x_n
    out_rows = (token * heads + head) * width
    angles = s * cos_s + b * cos_b
    x, y = _load_pairs(x_ptr, rows + first, there, pairs, INTERLEAVED, HEADS, PAIRS)
    x, y = _turned(x, y, cos_ptr + angles, sin_ptr + angles, pairs, direction, INTERLEAVED, PAIRS)
    _store_pairs(out_ptr, out_rows + first, there, pairs, x, y, INTERLEAVED, HEADS, PAIRS)
    if REST:
        column = tl.arange(0, REST)
        column_inside = there[:, None] & (column < width - 2 * pairs)[None, :]
        column = tl.where(column < first, column, column + 2 * pairs)
        rest = tl.load(x_ptr + rows[:, None] + column[None, :], mask=column_inside, other=0.0)
        tl.store(out_ptr + out_rows[:, None] + column[None, :], rest, mask=column_inside)


class _Rotation(torch.autograd.Function):
    """x [s, b, ..., w], cos, sin -> [s, b, ..., w]; keeps the angles."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, cos: Tensor, sin: Tensor, first: int, interleaved: bool
    ) -> Tensor:
        ctx.save_for_backward(cos, sin)
        ctx.first, ctx.interleaved = first, interleaved
        return _rotate(x, cos, sin, first, interleaved, 1.0)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        cos, sin = ctx.saved_tensors
        grad_x = _rotate(grad, cos, sin, ctx.first, ctx.interleaved, -1.0)
        return grad_x, None, None, None, None


def heads_of_program(heads: int, width: int) -> int:
    """Return how many heads of `width` channels a program takes: a power of two."""
    fitting = max(1, ELEMENTS // triton.next_power_of_2(width))
    return min(fitting, triton.next_power_of_2(heads))


def _rotate(
    x: Tensor, cos: Tensor, sin: Tensor, first: int, interleaved: bool, direction: float
) -> Tensor:
    x = x if x.stride(-1) == 1 else x.contiguous()  # channels must be adjacent
    width, rotated = x.shape[-1], cos.shape[-1]
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    # [s, b, n, w], or heads in groups: [s, b, g, n/g, w].
    groups = x if x.dim() == 5 else x.unsqueeze(3)
    s, b, g, n = groups.shape[:4]
    block = heads_of_program(g * n, width)
    rest = width - rotated
    rotation_kernel[(s * b, triton.cdiv(g * n, block))](
        x, cos, sin, out, *groups.stride()[:4], *_angle_strides(cos), b, g * n, n, width, first,
        rotated // 2, direction, INTERLEAVED=interleaved, HEADS=block,
        PAIRS=triton.next_power_of_2(rotated // 2),
        REST=triton.next_power_of_2(rest) if rest else 0, num_warps=NUM_WARPS,
    )  # fmt: skip
    return out


def _angle_strides(cos: Tensor) -> tuple[int, int]:
    """Return the steps from one position and sample to the next; 0 where they share angles."""
    of_position = cos.stride(0) if cos.shape[0] > 1 else 0
    return of_position, cos.stride(1) if cos.shape[1] > 1 else 0


def rotation(x: Tensor, cos: Tensor, sin: Tensor, interleaved: bool) -> Tensor:
    """Rotate the first channels of x [s, b, ..., w]; see `kernels.rotary.Rotation`."""
    return _Rotation.apply(x, cos.contiguous(), sin.contiguous(), 0, interleaved)


def latent_rotation(
    query: Tensor, key: Tensor, shared_key: Tensor, cos: Tensor, sin: Tensor, interleaved: bool
) -> tuple[Tensor, Tensor]:
    """Rotate the last p of query, key [s, b, n, d+p]; see `kernels.rotary.LatentRotation`."""
    cos, sin, heads = cos.contiguous(), sin.contiguous(), key.shape[:-1]
    query = _Rotation.apply(query, cos, sin, key.shape[-1], interleaved)
    shared_key = _Rotation.apply(shared_key.unsqueeze(2), cos, sin, 0, interleaved)
    return query, torch.cat((key, shared_key.expand(*heads, -1)), -1)
