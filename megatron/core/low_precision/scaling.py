"""Scale and round the operands of low-precision products: one scale per tensor, per block, or both.

A product contracts the last dimension of both operands, x [rows, k] and y [columns, k], so scales
may change along rows freely, and along k in blocks: within a block they are taken out of the sum.
The last block of a row may be shorter.

- E4M3 and E5M2, one scale per tensor: P. Micikevicius et al., "FP8 Formats for Deep Learning",
  table 1 and section 3.3, arXiv 2209.05433.
- Blocks of 1 x 128, tiles of 128 x 128: DeepSeek-AI, "DeepSeek-V3 Technical Report", section 3.3.2,
  arXiv 2412.19437.
- Blocks of 32 with a power of two: "OCP Microscaling Formats (MX) Specification" 1.0, sections 5.2
  and 6.3; the scale is rounded up, as A. Mishra et al., "Recipes for Pre-training LLMs with MXFP8",
  section 3, arXiv 2506.08027, so that the largest element of a block is not clipped.
- Blocks of 16 with an E4M3 scale, and a scale of the tensor: NVIDIA, "Pretraining Large Language
  Models with NVFP4", section 2 and appendix C, arXiv 2509.25149. E2M1: the MX specification, 5.3.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import ClassVar, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from megatron.core.kernels import triton_kernels
from megatron.core.kernels.registry import OTHER_DEVICES, Kernel, KernelTable, Request

LARGEST_E2M1 = 6.0
E8M0_BIAS = 127
"""E8M0 scales are the powers of two from 2^-127 to 2^127."""
_LARGEST_FP32 = torch.finfo(torch.float32).max


def in_working_dtype(x: Tensor) -> Tensor:
    """Return x [...] in the dtype it is scaled in: fp64 if x is fp64, else fp32."""
    return x if x.dtype == torch.float64 else x.float()


def torch_cast(x: Tensor, scale: Tensor, dtype: torch.dtype) -> Tensor:
    """Return x [...] times scale [] in an FP8 dtype: nearest, ties to even, saturating."""
    largest = torch.finfo(dtype).max
    return (in_working_dtype(x) * scale).clamp_(-largest, largest).to(dtype)


SCALED_CAST: KernelTable[Callable[[Tensor, Tensor, torch.dtype], Tensor]] = KernelTable(
    "FP8 cast with one scale",
    {
        "cpu": (Kernel("torch", torch_cast),),
        OTHER_DEVICES: (
            triton_kernels.entry("quantization", "scaled_cast"),
            Kernel("torch", torch_cast),
        ),
    },
)


def scaled_cast(x: Tensor, scale: Tensor, dtype: torch.dtype) -> Tensor:
    """Multiply x [...] by scale [] and round to FP8; numbers beyond the range saturate."""
    return SCALED_CAST.choose(Request.of(x)).kernel.run(x, scale, dtype)


def round_to_e2m1(x: Tensor, uniform: Tensor | None = None) -> Tensor:
    """Round x [...] to E2M1 numbers (0, 0.5, 1, 1.5, 2, 3, 4, 6), kept in the dtype of x.

    torch has a dtype for pairs of E2M1 codes, but no cast to it.

    Args:
        uniform: in [0, 1), like x: round to one of the two neighbours, to each with a probability
            that makes the expected value x. None rounds to the nearest, ties to even codes.
    """
    x = x.clamp(-LARGEST_E2M1, LARGEST_E2M1)
    magnitude = x.abs()
    spacing = torch.where(magnitude < 2, 0.5, torch.where(magnitude < 4, 1.0, 2.0)).to(x.dtype)
    units = magnitude / spacing
    units = units.round_() if uniform is None else units.add_(uniform).floor_()
    return torch.copysign(units.mul_(spacing), x)


@dataclass(frozen=True)
class Quantized:
    """A scaled and rounded operand of a product.

    Attributes:
        data: [rows, k]. With one scale per tensor: FP8. With scales per block: elements times
            scales, in fp32 (or fp64), which holds these products exactly.
        factor: [] in fp32 (or fp64), a factor on the finished product; None is 1.
        block_scales: [rows, blocks], or [row tiles, blocks]; None without blocks.
    """

    data: Tensor
    factor: Tensor | None = None
    block_scales: Tensor | None = None

    def dequantized(self) -> Tensor:
        """Return the numbers that the operand represents, [rows, k], in fp32 or fp64."""
        data = in_working_dtype(self.data)
        return data if self.factor is None else data * self.factor


@dataclass(frozen=True)
class Cut:
    """One dimension of a matrix whose other elements are on other ranks.

    Attributes:
        positions: int64, the place of each local element in the whole dimension.
        total: length of the whole dimension.
        piece: length of the runs of neighbours that ranks hold, equal on all ranks. Each run starts
            at a multiple of it; two runs of a rank may be neighbours.
        largest: reduces a tensor to its elementwise maximum over those ranks (a collective).
    """

    positions: Tensor
    total: int
    piece: int
    largest: Callable[[Tensor], Tensor]

    def keeps_whole(self, block: int) -> bool:
        """Whether every block of the whole dimension is on one rank.

        The answer must be equal on all ranks: where it is False, they enter the collective
        `largest`.
        """
        return self.piece % block == 0


@dataclass(frozen=True)
class Cuts:
    """The cuts of the rows and columns of a matrix; None: this rank holds the whole dimension."""

    rows: Cut | None = None
    columns: Cut | None = None


NOT_CUT = Cuts()


class Scaling(Protocol):
    """One way to scale and round an operand."""

    needs_amax: ClassVar[bool]
    """Whether `quantize` needs the largest magnitude of the whole tensor."""

    def quantize(
        self,
        x: Tensor,
        amax: Tensor | None = None,
        uniform: Tensor | None = None,
        cuts: Cuts = NOT_CUT,
    ) -> Quantized:
        """Scale and round x [rows, k].

        Args:
            amax: [] in the working dtype, of the whole tensor; x may be a part of it.
            uniform: in [0, 1), [rows, k]: round E2M1 stochastically. FP8 is rounded to the nearest.
            cuts: given if ranks share blocks: all-reduces compute the blocks' maxima over them.
        """


@dataclass(frozen=True)
class TensorScaling:
    """One scale, which maps `amax` to the largest number of the FP8 dtype.

    Attributes:
        margin: spare powers of two above amax.
    """

    dtype: torch.dtype
    margin: int = 0
    needs_amax: ClassVar[bool] = True

    @property
    def amax_of_scale_one(self) -> float:
        """Amax for which the scale is 1."""
        return torch.finfo(self.dtype).max / 2.0**self.margin

    def scale(self, amax: Tensor) -> Tensor:
        """Return the scale of a tensor with this amax, [] fp32; NaN if amax is not finite.

        A rounded product must not hide infinities of its operands: they must reach the loss.
        """
        scale = (torch.finfo(self.dtype).max / amax) / 2.0**self.margin
        scale = torch.where(amax == 0, 1.0, scale.clamp(max=_LARGEST_FP32))
        return torch.where(amax.isfinite(), scale, torch.nan)

    def quantize(
        self,
        x: Tensor,
        amax: Tensor | None = None,
        uniform: Tensor | None = None,
        cuts: Cuts = NOT_CUT,
    ) -> Quantized:
        """Round x [rows, k] to FP8 data [rows, k]."""
        assert amax is not None, "the scale of the tensor needs its amax"
        scale = self.scale(amax)
        return Quantized(scaled_cast(x, scale, self.dtype), 1.0 / scale)


@dataclass(frozen=True)
class BlockScaling:
    """Scales that are powers of two: of 1 x `block_size`, or of tiles `row_block_size` high.

    Attributes:
        is_e8m0: scales stay in the range of E8M0, 2^-127 ... 2^127.
        rounds_up: no scaled element exceeds the largest number. Otherwise the scale is the
            largest power of two in amax over the largest one in the format (MX specification,
            section 6.3), and larger elements saturate.
    """

    dtype: torch.dtype
    block_size: int
    row_block_size: int = 1
    is_e8m0: bool = False
    rounds_up: bool = True
    needs_amax: ClassVar[bool] = False

    def quantize(
        self,
        x: Tensor,
        amax: Tensor | None = None,
        uniform: Tensor | None = None,
        cuts: Cuts = NOT_CUT,
    ) -> Quantized:
        """Round x [rows, k] to dequantized data [rows, k]."""
        x = in_working_dtype(x)
        blocks = _Blocks(x, self.row_block_size, self.block_size, cuts)
        scales = self.block_scales(blocks.amax())
        spread = blocks.spread(scales)
        elements = torch_cast(x / spread, x.new_ones(()), self.dtype).to(x.dtype)
        return Quantized(elements * spread, None, scales)

    def block_scales(self, amax: Tensor) -> Tensor:
        """Return the scales of blocks with these amaxes, [...]; NaN where one is not finite."""
        largest_fraction, largest_exponent = math.frexp(torch.finfo(self.dtype).max)
        fraction, exponent = torch.frexp(amax.double())
        exponent = exponent - largest_exponent
        if self.rounds_up:
            exponent = exponent + (fraction > largest_fraction)
        if self.is_e8m0:
            exponent = torch.where(amax == 0, -E8M0_BIAS, exponent.clamp(-E8M0_BIAS, E8M0_BIAS))
        else:
            exponent = torch.where(amax == 0, 0, exponent.clamp(-126, 127))
        scales = torch.exp2(exponent.double())
        return torch.where(amax.isfinite(), scales, torch.nan).to(amax.dtype)


@dataclass(frozen=True)
class TwoLevelScaling:
    """E2M1 elements, an E4M3 scale of each block, and an fp32 scale of the tensor (NVFP4).

    The scale of the tensor maps the largest of the block scales to the largest E4M3 number.

    Attributes:
        row_block_size: 1, or 16: tiles of weights, whose transpose has the same elements.
    """

    block_size: int = 16
    row_block_size: int = 1
    needs_amax: ClassVar[bool] = True

    def quantize(
        self,
        x: Tensor,
        amax: Tensor | None = None,
        uniform: Tensor | None = None,
        cuts: Cuts = NOT_CUT,
    ) -> Quantized:
        """Round x [rows, k] to dequantized data [rows, k], without the scale of the tensor."""
        assert amax is not None, "the scale of the tensor needs its amax"
        x = in_working_dtype(x)
        largest_scale = torch.finfo(torch.float8_e4m3fn).max
        encode = (largest_scale * LARGEST_E2M1 / amax).clamp(max=_LARGEST_FP32)
        encode = torch.where(amax == 0, 1.0, encode)
        encode = torch.where(amax.isfinite(), encode, torch.nan)
        decode = 1.0 / encode
        blocks = _Blocks(x, self.row_block_size, self.block_size, cuts)
        wanted = blocks.amax() / LARGEST_E2M1 * encode
        scales = torch_cast(wanted, wanted.new_ones(()), torch.float8_e4m3fn).to(x.dtype)
        # A block scale of 0 has an infinite inverse; its elements are multiplied by 0 in the end.
        inverse = (1.0 / (scales * decode)).clamp(max=_LARGEST_FP32)
        elements = round_to_e2m1(x * blocks.spread(inverse), uniform)
        return Quantized(elements * blocks.spread(scales), decode, scales)


class _Axis:
    """Blocks along one dimension of a matrix.

    Where ranks share blocks of the dimension, each element has the number of its block, and the
    amax of a block is taken over all of these ranks.
    """

    def __init__(self, size: int, block: int, cut: Cut | None, device: torch.device) -> None:
        self.size, self.block = size, block
        self.cut = None if cut is None or cut.keeps_whole(block) else cut
        self.numbers: Tensor | None = None
        self.count = -(-size // block)
        if self.cut is not None:
            self.numbers = (self.cut.positions // block).to(device)
            self.count = -(-self.cut.total // block)

    def amax(self, x: Tensor, dim: int) -> Tensor:
        """Return the largest element of each block of x along dimension 0 or 1."""
        if self.numbers is not None:
            shape = list(x.shape)
            shape[dim] = self.count
            numbers = self.numbers if dim == 1 else self.numbers[:, None]
            return x.new_zeros(shape).scatter_reduce_(dim, numbers.expand_as(x), x, "amax")
        missing = -self.size % self.block
        if missing:
            x = F.pad(x, (0, missing) if dim == 1 else (0, 0, 0, missing))
        return x.unflatten(dim, (self.count, self.block)).amax(dim + 1)

    def spread(self, scales: Tensor, dim: int) -> Tensor:
        """Return the scale of its block for every element along a dimension."""
        if self.numbers is not None:
            return scales.index_select(dim, self.numbers)
        if self.block == 1:
            return scales
        return scales.repeat_interleave(self.block, dim).narrow(dim, 0, self.size)


class _Blocks:
    """A matrix [rows, k] in blocks of m x n."""

    def __init__(self, x: Tensor, m: int, n: int, cuts: Cuts) -> None:
        self.values = x
        self._rows = _Axis(x.shape[0], m, cuts.rows, x.device)
        self._columns = _Axis(x.shape[1], n, cuts.columns, x.device)

    def amax(self) -> Tensor:
        """Return the largest magnitude of each block, [row blocks, blocks], over all ranks."""
        found = self._columns.amax(self.values.abs(), 1)
        if self._rows.block > 1:
            found = self._rows.amax(found, 0)
        for cut in (self._rows.cut if self._rows.block > 1 else None, self._columns.cut):
            if cut is not None:
                found = cut.largest(found)
        return found

    def spread(self, scales: Tensor) -> Tensor:
        """Return the scale of its block for every element: [row blocks, blocks] -> [rows, k]."""
        if self._rows.block > 1:
            scales = self._rows.spread(scales, 0)
        return self._columns.spread(scales, 1)
