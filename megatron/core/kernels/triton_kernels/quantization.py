"""Multiply by one scale and round to FP8 in one pass: 3 bytes of traffic per bf16 element.

The kernel computes the code with integers, so that it also compiles for GPUs without FP8 units and
equals torch's casts bit for bit.
"""

from __future__ import annotations

import math

import torch
import triton
import triton.language as tl
from torch import Tensor

ELEMENTS = 2048
"""Elements of a program's tile: 16 of each thread."""
NUM_WARPS = 4


@triton.jit
def scaled_cast_kernel(
    x_ptr, scale_ptr, out_ptr, count,
    LARGEST: tl.constexpr, LOWEST: tl.constexpr, MANTISSA: tl.constexpr, ELEMENTS: tl.constexpr,
):  # fmt: skip
    """Write the codes, uint8 [count], of x [count] times scale [1].

    LARGEST: largest number of the format; LOWEST: exponent of its smallest normal number.
    """
    place = tl.program_id(0).to(tl.int64) * ELEMENTS + tl.arange(0, ELEMENTS)
    inside = place < count
    x = tl.load(x_ptr + place, mask=inside, other=0.0).to(tl.float32) * tl.load(scale_ptr)
    bits = x.to(tl.int32, bitcast=True)
    is_nan = (bits & 0x7FFFFFFF) > 0x7F800000
    magnitude = tl.minimum((bits & 0x7FFFFFFF).to(tl.float32, bitcast=True), LARGEST)
    field = magnitude.to(tl.int32, bitcast=True)
    # To nearest, ties to even: the bits below the fraction carry into it.
    dropped: tl.constexpr = 23 - MANTISSA
    normal = (field + (1 << (dropped - 1)) - 1 + ((field >> dropped) & 1)) >> dropped
    normal -= (LOWEST + 126) << MANTISSA
    # The sum's last bit has the spacing of the subnormal numbers, so its low bits count them.
    unit = ((LOWEST - MANTISSA + 23 + 127) << 23) + tl.zeros([ELEMENTS], tl.int32)
    counted = (magnitude + unit.to(tl.float32, bitcast=True)).to(tl.int32, bitcast=True) - unit
    code = tl.where(field < ((LOWEST + 127) << 23), counted, normal)
    code = tl.where(is_nan, 0x7F, code) | ((bits >> 24) & 0x80)
    tl.store(out_ptr + place, code.to(tl.uint8), mask=inside)


def scaled_cast(x: Tensor, scale: Tensor, dtype: torch.dtype) -> Tensor:
    """Return x [...] times scale [], fp32, rounded to an FP8 dtype, with the strides of x."""
    out = torch.empty_like(x, dtype=dtype)
    if out.stride() != x.stride():  # x has gaps or overlaps
        x = x.contiguous()
        out = torch.empty_like(x, dtype=dtype)
    format = torch.finfo(dtype)
    scaled_cast_kernel[(triton.cdiv(x.numel(), ELEMENTS),)](
        x, scale, out.view(torch.uint8), x.numel(),
        LARGEST=format.max, LOWEST=exponent(format.smallest_normal), MANTISSA=-exponent(format.eps),
        ELEMENTS=ELEMENTS, num_warps=NUM_WARPS,
    )  # fmt: skip
    return out


def exponent(power: float) -> int:
    """Return e of the number 2^e."""
    return math.frexp(power)[1] - 1
