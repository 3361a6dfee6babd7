"""Scaling and rounding to FP8 in one pass, to the bit as `megatron.core.low_precision` does it.

A block of 32 or 128 elements along the contracted dimension is read once: its largest magnitude
gives a power of two, its elements are rounded to the nearest number, of two equally near ones to
the even one. The matrix may be a transposed view, so that a weight is quantised for both of its
products without a copy. Exponents are handled as bits: no result depends on how a device divides.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

ELEMENTS = 2048
"""Elements of a program's tile: 16 of each thread."""
NUM_WARPS = 4


@triton.jit
def _rounded(x, LARGEST: tl.constexpr, LOWEST: tl.constexpr, MANTISSA: tl.constexpr):
    """Round fp32 x, which may be NaN, to the nearest number of a format that saturates."""
    bits = x.to(tl.int32, bitcast=True)
    magnitude_bits = bits & 0x7FFFFFFF
    magnitude = tl.minimum(magnitude_bits.to(tl.float32, bitcast=True), LARGEST)
    field = magnitude.to(tl.int32, bitcast=True) >> 23
    spacing_field = tl.maximum(field, LOWEST + 127) - MANTISSA
    inverse = ((254 - spacing_field) << 23).to(tl.float32, bitcast=True)
    # Adding 1.5 * 2^23 leaves no bit below the units: the sum is rounded to nearest, ties to even.
    units = (magnitude * inverse + 12582912.0) - 12582912.0
    rounded = units * (spacing_field << 23).to(tl.float32, bitcast=True)
    with_sign = rounded.to(tl.int32, bitcast=True) | (bits & -2147483648)
    return tl.where(magnitude_bits > 0x7F800000, x, with_sign.to(tl.float32, bitcast=True))


@triton.jit
def blocks_kernel(
    x_ptr, values_ptr, elements_ptr, scales_ptr, rows, width, x_row, x_column, blocks,
    LARGEST: tl.constexpr, LOWEST: tl.constexpr, HIGHEST: tl.constexpr, MANTISSA: tl.constexpr,
    IS_E8M0: tl.constexpr, ROUNDS_UP: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Quantise one block of some rows.

    values, elements: fp32 [rows, width]; scales: fp32 [rows, blocks].
    """
    row = (tl.program_id(0) * ROWS + tl.arange(0, ROWS)).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = (row < rows)[:, None] & (column < width)[None, :]
    place = row[:, None] * x_row + column.to(tl.int64)[None, :] * x_column
    x = tl.load(x_ptr + place, mask=inside, other=0.0).to(tl.float32)
    # As integers, so that NaN is the largest of all.
    amax = tl.max(x.to(tl.int32, bitcast=True) & 0x7FFFFFFF, 1)
    is_finite = amax < 0x7F800000
    exponent = (amax >> 23) - 127 - HIGHEST
    if ROUNDS_UP:  # the largest number of both formats is 1.75 times a power of two
        exponent += ((amax & 0x7FFFFF) > 0x600000).to(tl.int32)
    if IS_E8M0:
        exponent = tl.minimum(tl.maximum(exponent, -127), 127)
    else:
        exponent = tl.where(amax == 0, 0, tl.minimum(tl.maximum(exponent, -126), 127))
    # 2^-127 is below the normal range of fp32.
    scale = tl.where(exponent == -127, 0x400000, (exponent + 127) << 23)
    inverse = tl.where(exponent == 127, 0x400000, (127 - exponent) << 23)
    scale = tl.where(is_finite, scale, 0x7FC00000).to(tl.float32, bitcast=True)
    inverse = tl.where(is_finite, inverse, 0x7FC00000).to(tl.float32, bitcast=True)
    elements = _rounded(x * inverse[:, None], LARGEST, LOWEST, MANTISSA)
    out = row[:, None] * width + column[None, :]
    tl.store(elements_ptr + out, elements, mask=inside)
    tl.store(values_ptr + out, elements * scale[:, None], mask=inside)
    tl.store(scales_ptr + row * blocks + tl.program_id(1), scale, mask=row < rows)


@triton.jit
def elements_kernel(
    x_ptr, scale_ptr, out_ptr, count,
    LARGEST: tl.constexpr, LOWEST: tl.constexpr, MANTISSA: tl.constexpr, ELEMENTS: tl.constexpr,
):  # fmt: skip
    """Multiply by one scale and round."""
    place = tl.program_id(0).to(tl.int64) * ELEMENTS + tl.arange(0, ELEMENTS)
    inside = place < count
    x = tl.load(x_ptr + place, mask=inside, other=0.0).to(tl.float32) * tl.load(scale_ptr)
    tl.store(out_ptr + place, _rounded(x, LARGEST, LOWEST, MANTISSA), mask=inside)


def quantize_blocks(
    x: Tensor, block: int, largest: float, exponents: tuple[int, int], mantissa: int,
    is_e8m0: bool, rounds_up: bool,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """Return values and elements [rows, k] and scales [rows, blocks] of x [rows, k], all fp32.

    Args:
        block: elements along k that share a scale, a power of two.
        largest, exponents, mantissa: of the format: its largest number, the exponents of its
            smallest normal and its largest number, and bits of the fraction.
    """
    rows, width = x.shape
    blocks = triton.cdiv(width, block)
    values = torch.empty((rows, width), dtype=torch.float32, device=x.device)
    elements = torch.empty_like(values)
    scales = torch.empty((rows, blocks), dtype=torch.float32, device=x.device)
    rows_of_program = ELEMENTS // block
    blocks_kernel[(triton.cdiv(rows, rows_of_program), blocks)](
        x, values, elements, scales, rows, width, *x.stride(), blocks,
        LARGEST=largest, LOWEST=exponents[0], HIGHEST=exponents[1], MANTISSA=mantissa,
        IS_E8M0=is_e8m0, ROUNDS_UP=rounds_up, ROWS=rows_of_program, BLOCK=block,
        num_warps=NUM_WARPS,
    )  # fmt: skip
    return values, elements, scales


def round_scaled(x: Tensor, scale: Tensor, largest: float, lowest: int, mantissa: int) -> Tensor:
    """Return x [...] times scale [], rounded to a format, fp32; see `quantize_blocks`."""
    x = x.contiguous()
    out = torch.empty(x.shape, dtype=torch.float32, device=x.device)
    elements_kernel[(triton.cdiv(x.numel(), ELEMENTS),)](
        x, scale, out, x.numel(),
        LARGEST=largest, LOWEST=lowest, MANTISSA=mantissa, ELEMENTS=ELEMENTS, num_warps=NUM_WARPS,
    )  # fmt: skip
    return out
