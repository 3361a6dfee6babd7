"""Bit-exact emulation of low-precision formats and products: the oracle of their tests.

E4M3 and E5M2: P. Micikevicius et al., "FP8 Formats for Deep Learning", table 1, arXiv 2209.05433.
E2M1 and E8M0: Open Compute Project, "OCP Microscaling Formats (MX) Specification" 1.0, sections 5.3
and 5.4.1.

A number has a sign, an exponent field of `exponent_bits` and `mantissa_bits` of a fraction. Field 0
holds the subnormal numbers, spaced as the smallest normal numbers are. Rounding is to the nearest
number, ties to the even code, and saturates.

Everything is arithmetic on fp32 or fp64 tensors, without torch's low-precision dtypes.
"""

import functools
import math
from dataclasses import dataclass

import torch
from torch import Tensor

_EXPONENT_FIELD = {
    torch.float32: (torch.int32, 0x7F80_0000, 23, 127),
    torch.float64: (torch.int64, 0x7FF0_0000_0000_0000, 52, 1023),
}
"""dtype -> integers of its size, their bits of the exponent, how far they are shifted, the bias."""


def in_working_dtype(x: Tensor) -> Tensor:
    """Return x [...] in fp64 if it is that, else in fp32: where it is scaled and rounded."""
    return x if x.dtype in _EXPONENT_FIELD else x.float()


def power_of_two_below(x: Tensor) -> Tensor:
    """Return the largest power of two that is not above |x| [...]; 0 below the normal range."""
    integers, mask, _, _ = _EXPONENT_FIELD[x.dtype]
    return (x.view(integers) & mask).view(x.dtype)


def exponent_of(x: Tensor) -> Tensor:
    """Return floor(log2 |x|) of normal x [...], int32; the lowest exponent less one below those."""
    integers, mask, shift, bias = _EXPONENT_FIELD[x.dtype]
    return ((x.view(integers) & mask) >> shift).to(torch.int32) - bias


@dataclass(frozen=True)
class ElementFormat:
    """One format of elements.

    Attributes:
        bias: what is added to an exponent to make its field.
        largest: the largest finite number.
        nan_code: the positive code that is no number; None: every code is one.
        dtype: torch's dtype of the codes.
    """

    name: str
    exponent_bits: int
    mantissa_bits: int
    bias: int
    largest: float
    nan_code: int | None
    dtype: torch.dtype | None = None

    @property
    def bits(self) -> int:
        """Bits of a code."""
        return 1 + self.exponent_bits + self.mantissa_bits

    @property
    def lowest_exponent(self) -> int:
        """Exponent of the smallest normal number."""
        return 1 - self.bias

    @property
    def highest_exponent(self) -> int:
        """Exponent of the largest number."""
        return math.frexp(self.largest)[1] - 1

    def round(self, x: Tensor, uniform: Tensor | None = None) -> Tensor:
        """Return the numbers of this format that stand for x [...], fp32 or fp64, in its dtype.

        Args:
            uniform: in [0, 1), as x: round to one of the two neighbours, to each with a probability
                that makes the expected value x. None rounds to the nearest.
        """
        x = x.clamp(-self.largest, self.largest)
        spacing = self._spacing(x)
        units = x / spacing
        if uniform is None:
            return units.round_().mul_(spacing)
        rounded = units.abs().add_(uniform).floor_().mul_(spacing)
        return torch.copysign(rounded, x)

    def _spacing(self, x: Tensor) -> Tensor:
        """Return the distance of the numbers around x [...], whose magnitude is in range."""
        lowest: float = 2.0**self.lowest_exponent
        return power_of_two_below(x).clamp_(min=lowest).mul_(2.0**-self.mantissa_bits)

    def encode(self, x: Tensor) -> Tensor:
        """Round x [...] and return the codes, uint8 [...]; the bits above `bits` are 0."""
        values = self.round(in_working_dtype(x))
        is_nan = values.isnan()
        finite = values.nan_to_num(0.0)
        units = (finite / self._spacing(finite)).abs().to(torch.int32)
        binade = (exponent_of(finite) - self.lowest_exponent).clamp_(min=0)
        code = units + (binade << self.mantissa_bits)
        if self.nan_code is not None:
            code = torch.where(is_nan, self.nan_code, code)
        return (code + (torch.signbit(values).int() << (self.bits - 1))).to(torch.uint8)

    def decode(self, codes: Tensor) -> Tensor:
        """Return the numbers of codes, uint8 [...], in fp32."""
        return _numbers(self).to(codes.device)[codes.int()]


E4M3 = ElementFormat("e4m3", 4, 3, 7, 448.0, 0x7F, torch.float8_e4m3fn)
E5M2 = ElementFormat("e5m2", 5, 2, 15, 57344.0, 0x7F, torch.float8_e5m2)
E2M1 = ElementFormat("e2m1", 2, 1, 1, 6.0, None)


@functools.cache
def _numbers(format: ElementFormat) -> Tensor:
    """Return the number of every code, fp32 [2 ** bits]."""
    numbers = []
    for code in range(2 ** (format.bits - 1)):
        field, fraction = divmod(code, 2**format.mantissa_bits)
        units = fraction if field == 0 else fraction + 2**format.mantissa_bits
        exponent = max(field, 1) - format.bias - format.mantissa_bits
        number = units * 2.0**exponent
        if number > format.largest:
            is_infinite = format is E5M2 and fraction == 0
            number = float("inf") if is_infinite else float("nan")
        numbers.append(number)
    positive = torch.tensor(numbers)
    return torch.cat([positive, -positive])


def pack_pairs(codes: Tensor) -> Tensor:
    """Put two four-bit codes of [..., 2 k] into a byte, the first into the low half: [..., k]."""
    return codes[..., ::2] | (codes[..., 1::2] << 4)


E8M0_BIAS = 127
E8M0_NAN = 255


def e8m0_codes(scales: Tensor) -> Tensor:
    """Return the codes of scales that are powers of two (or NaN), uint8 [...]."""
    # 2^-127 is below the normal range of fp32: in fp64 every scale is normal.
    exponents = exponent_of(scales.double()) + E8M0_BIAS
    return torch.where(scales.isnan(), E8M0_NAN, exponents).to(torch.uint8)


def emulated_product(left: Tensor, right: Tensor, factor: Tensor) -> Tensor:
    """Return left [m, k] times the transpose of right [n, k] times factor []: [m, n] fp64.

    Elements and scales are exact in fp64, and sums of their products nearly so.
    """
    return left.double() @ right.double().t() * factor.double()
