"""Optimizer state in fewer bytes than fp32, in blocks of 128 elements.

Rounding moments to nearest in a small type fails in two ways. First, a moving average with decay
0.999 changes by a thousandth per step, which is less than half the spacing of bf16 (2^-9) and of
fp8 (2^-4), so it never changes again. Values are therefore rounded up or down at random, with the
probability that makes the expectation exact (S. Gupta et al., "Deep Learning with Limited Numerical
Precision", section 3, arXiv 1502.02551). Second, types with few exponents underflow. fp16 and fp8
have a power of two per block as scale (as T. Dettmers et al., "8-bit Optimizers via Block-wise
Quantization", arXiv 2110.02861), and the second moment is stored as its root, which halves the
range of exponents; a nonzero second moment is never rounded to zero, because the update divides by
it.

The random bits are a hash of the element's place in its parameter and of the step, so they do not
depend on the sharding or the place of state, or on a resume. Encoding decoded values is exact: a
checkpoint of fp32 values restores the same bytes.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from megatron.core.distributed.sharding_arithmetic import BLOCK
from megatron.core.foundation.errors import ConfigError

SCALE_BYTES = 4


class Codec(Protocol):
    """Turns blocks of fp32 values into bytes and back."""

    @property
    def block_bytes(self) -> int:
        """Bytes of a block of `BLOCK` elements."""
        ...

    @property
    def is_exact(self) -> bool:
        """Whether the bytes are fp32 values, which are updated in place."""
        ...

    def decode(self, stored: Tensor) -> Tensor:
        """Return fp32 [blocks, BLOCK] from uint8 [blocks, block_bytes]; a view if exact."""
        ...

    def encode(self, values: Tensor, stored: Tensor, noise: Tensor | None) -> None:
        """Write fp32 [blocks, BLOCK] to uint8 [blocks, block_bytes].

        Args:
            noise: int32 [blocks, BLOCK] of random bits; None rounds to nearest.
        """
        ...


@dataclass(frozen=True)
class Float32Codec:
    """fp32: the bytes are the values."""

    block_bytes: int = 4 * BLOCK
    is_exact: bool = True

    def decode(self, stored: Tensor) -> Tensor:
        """Return fp32 [blocks, BLOCK]."""
        return stored.view(torch.float32)

    def encode(self, values: Tensor, stored: Tensor, noise: Tensor | None) -> None:
        """Write fp32 [blocks, BLOCK]."""
        current = stored.view(torch.float32)
        if current.data_ptr() != values.data_ptr():
            current.copy_(values)


@dataclass(frozen=True)
class BFloat16Codec:
    """bf16, which has the exponents of fp32 and needs no scale."""

    block_bytes: int = 2 * BLOCK
    is_exact: bool = False

    def decode(self, stored: Tensor) -> Tensor:
        """Return fp32 [blocks, BLOCK]."""
        return stored.view(torch.bfloat16).float()

    def encode(self, values: Tensor, stored: Tensor, noise: Tensor | None) -> None:
        """Write fp32 [blocks, BLOCK]."""
        if noise is not None:
            values = _round_at_random(values, noise, dropped_bits=16)
        stored.view(torch.bfloat16).copy_(values)


@dataclass(frozen=True)
class BlockScaledCodec:
    """A small type, with a power of two as scale of a block in four bytes after its values."""

    dtype: torch.dtype
    dropped_bits: int
    """Bits of the fp32 significand that the type lacks."""
    smallest_normal: float
    largest: float
    stores_root: bool = False
    """Store the square roots of nonnegative values."""
    is_exact: bool = False

    @property
    def block_bytes(self) -> int:
        return BLOCK * self.dtype.itemsize + SCALE_BYTES

    def decode(self, stored: Tensor) -> Tensor:
        """Return fp32 [blocks, BLOCK]."""
        values = self._values(stored).float().mul_(_scales(stored))
        return values.square_() if self.stores_root else values

    def encode(self, values: Tensor, stored: Tensor, noise: Tensor | None) -> None:
        """Write fp32 [blocks, BLOCK]."""
        is_positive = values > 0
        values = values.sqrt() if self.stores_root else values
        largest = values.abs().amax(dim=1, keepdim=True)
        fraction, exponent = torch.frexp(largest)  # largest = fraction * 2^exponent, [0.5, 1)
        top_fraction, top_exponent = math.frexp(self.largest)
        exponent = exponent - top_exponent + (fraction > top_fraction).int()
        # Within the normal fp32 numbers, so that neither the scale nor its inverse is rounded.
        scale = torch.ldexp(torch.ones_like(largest), exponent.clamp_(-120, 120))
        scaled = values / scale
        if noise is not None:
            scaled = self._round(scaled, noise)
        if self.stores_root:
            smallest = self.smallest_normal * 2.0 ** (self.dropped_bits - 23)
            scaled = torch.where(is_positive, scaled.clamp_min(smallest), scaled)
        self._values(stored).copy_(scaled.clamp_(-self.largest, self.largest))
        _scales(stored).copy_(scale)

    def _round(self, scaled: Tensor, noise: Tensor) -> Tensor:
        """Round to the values of the type, up or down at random."""
        normal = _round_at_random(scaled, noise, self.dropped_bits)
        # Below the smallest normal number values are evenly spaced.
        spacing = self.smallest_normal * 2.0 ** (self.dropped_bits - 23)
        uniform = (noise & 0xFFFF).float().mul_(2.0**-16)
        even = (scaled.abs() / spacing).add_(uniform).floor_().mul_(spacing).copysign_(scaled)
        return torch.where(scaled.abs() < self.smallest_normal, even, normal)

    def _values(self, stored: Tensor) -> Tensor:
        return stored[:, : BLOCK * self.dtype.itemsize].view(self.dtype)


def codec_of(dtype: torch.dtype, *, is_second_moment: bool = False) -> Codec:
    """Return the codec of state in `dtype`; uint8 means fp8, as in Megatron's configs."""
    if dtype == torch.float32:
        return Float32Codec()
    if dtype == torch.bfloat16:
        return BFloat16Codec()
    if dtype == torch.float16:
        return BlockScaledCodec(torch.float16, 13, 2.0**-14, 65504.0, is_second_moment)
    if dtype not in (torch.uint8, torch.float8_e4m3fn):
        raise ConfigError(
            f"state of the optimizer in {dtype}.",
            rule="its dtype is fp32, bf16, fp16 or fp8",
            flags=["--exp-avg-dtype", "--exp-avg-sq-dtype"],
            fix="use torch.float32, torch.bfloat16, torch.float16 or torch.uint8, which means fp8",
        )
    return BlockScaledCodec(torch.float8_e4m3fn, 20, 2.0**-6, 448.0, is_second_moment)


def random_bits(positions: Tensor, step: int) -> Tensor:
    """Hash int32 places [...] and a step to int32 random bits [...].

    Rounds of multiply and shift, with constants from C. Wellons' search for such functions.
    """
    mixed = positions * _as_int32(0x9E3779B1) + _as_int32(step * 0x85EBCA6B)
    for shift, factor in ((16, 0x21F0AAAD), (15, 0x735A2D97)):
        mixed ^= (mixed >> shift) & ((1 << (32 - shift)) - 1)
        mixed *= _as_int32(factor)
    return mixed.bitwise_xor_((mixed >> 15) & 0x1FFFF)


def _as_int32(number: int) -> int:
    return (number + 2**31) % 2**32 - 2**31


def _round_at_random(values: Tensor, noise: Tensor, dropped_bits: int) -> Tensor:
    """Drop the low bits of fp32 values after adding random bits to them."""
    mask = (1 << dropped_bits) - 1
    bits = values.contiguous().view(torch.int32) + (noise & mask)
    return bits.bitwise_and_(~mask).view(torch.float32)


def _scales(stored: Tensor) -> Tensor:
    """Return the scales [blocks, 1]."""
    return stored[:, -SCALE_BYTES:].view(torch.float32)


def split_remainder(main: Tensor) -> tuple[Tensor, Tensor]:
    """Return (upper, lower): the nearest bf16 numbers, and int16 differences in fp32 bits.

    A bf16 number is the upper half of an fp32 number. The model stores the rounded upper half of
    the main weight, so the optimizer stores only the difference: two bytes instead of four, without
    loss. Exact ties are rounded away from zero, not to even, because the difference must fit 16
    bits.

    Args:
        main: fp32 [...], contiguous.
    """
    bits = main.view(torch.int32)
    upper = (bits + 0x8000) >> 16
    lower = (bits - (upper << 16)).to(torch.int16)
    return upper.to(torch.int16).view(torch.bfloat16), lower


def join_remainder(upper: Tensor, lower: Tensor) -> Tensor:
    """Return the fp32 main weights [...] of `split_remainder`, from parts of their shape."""
    high = upper.contiguous().view(torch.int16).to(torch.int32) << 16
    return (high + lower.to(torch.int32)).view(torch.float32)
