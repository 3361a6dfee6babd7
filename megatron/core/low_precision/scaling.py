"""How tensors are scaled before they are rounded: by one number, by blocks, or by both.

A product contracts the last dimension of both operands, x [rows, k] and y [columns, k], so scales
may change along rows freely, and along k in blocks: within a block they are taken out of the sum.
The last block of a row may be shorter.

- One scale of a tensor: P. Micikevicius et al., "FP8 Formats for Deep Learning", section 3.3,
  arXiv 2209.05433.
- Blocks of 1 x 128, tiles of 128 x 128: DeepSeek-AI, "DeepSeek-V3 Technical Report", section 3.3.2,
  arXiv 2412.19437.
- Blocks of 32 with a power of two: "OCP Microscaling Formats (MX) Specification" 1.0, sections 5.2
  and 6.3; the scale is rounded up, as A. Mishra et al., "Recipes for Pre-training LLMs with MXFP8",
  section 3, arXiv 2506.08027, so that the largest element of a block is not cut.
- Blocks of 16 with an E4M3 scale, and a scale of the tensor: NVIDIA, "Pretraining Large Language
  Models with NVFP4", section 2 and appendix C, arXiv 2509.25149.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from megatron.core.kernels import triton_kernels
from megatron.core.kernels.registry import OTHER_DEVICES, Kernel, KernelTable, Request
from megatron.core.low_precision.formats import (
    E2M1,
    E4M3,
    E8M0_BIAS,
    ElementFormat,
    in_working_dtype,
    power_of_two_below,
)

_LARGEST_FP32 = torch.finfo(torch.float32).max


@dataclass(frozen=True)
class Quantized:
    """An operand as a product takes it.

    Attributes:
        values: [rows, k], elements times the scales of their blocks: exact in fp32, because both
            have few bits.
        factor: [] fp32 by which the product is multiplied at its end; None is 1. The inverse of the
            tensor's scale is not a power of two, so it is kept apart.
        format: of the elements.
        elements: [rows, k], what is rounded.
        block_scales: [rows, blocks], or [row tiles, blocks] of tiles; None without blocks.
    """

    values: Tensor
    format: ElementFormat
    elements: Tensor
    factor: Tensor | None = None
    block_scales: Tensor | None = None

    def dequantized(self) -> Tensor:
        """Return the numbers that it stands for, [rows, k]."""
        return self.values if self.factor is None else self.values * self.factor


@dataclass(frozen=True)
class Cut:
    """One dimension of which other ranks hold the rest.

    Attributes:
        positions: int64, the place of each local element in the whole dimension.
        total: length of the whole dimension.
        piece: length of the runs of neighbours that ranks hold, the same on all of them. Each
            starts at a multiple of it; two of a rank may be neighbours.
        largest: takes the maximum of a tensor over those ranks, element by element.
    """

    positions: Tensor
    total: int
    piece: int
    largest: Callable[[Tensor], Tensor]

    def keeps_whole(self, block: int) -> bool:
        """Whether no block of the whole dimension has elements on two ranks.

        All ranks say the same, since those that say no meet in `largest`.
        """
        return self.piece % block == 0


@dataclass(frozen=True)
class Cuts:
    """How the rows and columns of a matrix are cut; None: this rank holds all of a dimension."""

    rows: Cut | None = None
    columns: Cut | None = None


NOT_CUT = Cuts()


class Scaling(Protocol):
    """One way to scale and round an operand."""

    @property
    def block_size(self) -> int:
        """Elements along the contracted dimension that share a scale; 1: the whole tensor does."""

    @property
    def row_block_size(self) -> int:
        """Rows that share a scale."""

    @property
    def needs_amax(self) -> bool:
        """Whether the largest magnitude of the tensor has to be known."""

    def quantize(
        self,
        x: Tensor,
        amax: Tensor | None = None,
        uniform: Tensor | None = None,
        cuts: Cuts = NOT_CUT,
    ) -> Quantized:
        """Scale and round x [rows, k].

        Args:
            amax: [] in the dtype x is rounded in, of the whole tensor of which x may be a part.
            uniform: in [0, 1), [rows, k]: round at random. None rounds to the nearest.
            cuts: where blocks reach over to other ranks.
        """


@dataclass(frozen=True)
class TensorScaling:
    """One scale, which brings `amax` to the largest number of the format.

    Attributes:
        margin: powers of two that are left free above amax.
    """

    format: ElementFormat
    margin: int = 0
    block_size: int = 1
    row_block_size: int = 1
    needs_amax: bool = True

    @property
    def amax_of_scale_one(self) -> float:
        """Amax for which elements are rounded as they are."""
        return self.format.largest / 2.0**self.margin

    def scale(self, amax: Tensor) -> Tensor:
        """Return what a tensor of this amax, [] fp32, is multiplied with; NaN if it is not finite.

        Infinities in a tensor shall not vanish in a rounded product: the loss has to show them.
        """
        scale = (self.format.largest / amax) / 2.0**self.margin
        scale = torch.where(amax == 0, 1.0, scale.clamp(max=_LARGEST_FP32))
        return torch.where(amax.isfinite(), scale, torch.nan)

    def quantize(
        self,
        x: Tensor,
        amax: Tensor | None = None,
        uniform: Tensor | None = None,
        cuts: Cuts = NOT_CUT,
    ) -> Quantized:
        """See `Scaling`."""
        assert amax is not None, "one scale of a tensor needs its amax"
        scale = self.scale(amax)
        elements = round_to_scale(self.format, x, scale, uniform)
        return Quantized(elements, self.format, elements, 1.0 / scale)


@dataclass(frozen=True)
class BlockScaling:
    """Scales that are powers of two: of 1 x `block_size`, or of tiles `row_block_size` high.

    Attributes:
        is_e8m0: scales stay in the range of E8M0, 2^-127 ... 2^127.
        rounds_up: no element is above the largest number after scaling. Otherwise the scale is the
            largest power of two in amax over the largest one in the format (the OCP
            specification, section 6.3), and elements above are cut.
    """

    format: ElementFormat
    block_size: int
    row_block_size: int = 1
    is_e8m0: bool = False
    rounds_up: bool = True
    needs_amax: bool = False

    def quantize(
        self,
        x: Tensor,
        amax: Tensor | None = None,
        uniform: Tensor | None = None,
        cuts: Cuts = NOT_CUT,
    ) -> Quantized:
        """See `Scaling`; amax is not read."""
        needs = _needs(uniform)
        if self.row_block_size > 1:
            needs.add(TILES)
        if cuts.columns is not None:
            needs.add(SHARED_BLOCKS)
        kernel = BLOCK_QUANTIZATION.choose(Request.of(x, needs)).kernel
        return kernel.run(self, x, uniform, cuts)

    def block_scales(self, amax: Tensor) -> Tensor:
        """Return the scale of blocks with these amaxes, [...]; NaN where one is not finite."""
        # The largest power of two that is not above amax, over that of the largest number.
        power = power_of_two_below(amax.double())
        scale = power * 2.0**-self.format.highest_exponent
        if self.rounds_up:
            # amax = fraction * power, and the largest number is a fraction times a power as well.
            largest_fraction = self.format.largest * 2.0**-self.format.highest_exponent
            scale = torch.where(amax > largest_fraction * power, 2.0 * scale, scale)
        if self.is_e8m0:
            scale = scale.clamp(2.0**-E8M0_BIAS, 2.0**E8M0_BIAS)
        else:
            scale = torch.where(amax == 0, 1.0, scale.clamp(2.0**-126, 2.0**127))
        return torch.where(amax.isfinite(), scale, torch.nan).to(amax.dtype)


@dataclass(frozen=True)
class TwoLevelScaling:
    """E2M1 elements, an E4M3 scale of each block, and an fp32 scale of the tensor (NVFP4).

    The scale of the tensor brings the largest of the block scales to the largest E4M3 number.

    Attributes:
        row_block_size: 1, or 16: tiles of weights, whose transpose has the same elements.
    """

    block_size: int = 16
    row_block_size: int = 1
    needs_amax: bool = True

    def quantize(
        self,
        x: Tensor,
        amax: Tensor | None = None,
        uniform: Tensor | None = None,
        cuts: Cuts = NOT_CUT,
    ) -> Quantized:
        """See `Scaling`."""
        assert amax is not None, "the scale of the tensor needs its amax"
        encode = (E4M3.largest * E2M1.largest / amax).clamp(max=_LARGEST_FP32)
        encode = torch.where(amax == 0, 1.0, encode)
        encode = torch.where(amax.isfinite(), encode, torch.nan)
        decode = 1.0 / encode
        x = in_working_dtype(x)
        blocks = _Blocks(x, self.row_block_size, self.block_size, cuts)
        wanted = blocks.amax() / E2M1.largest * encode
        scales = E4M3.round(wanted.clamp(max=_LARGEST_FP32))
        # A block scale of 0 has an infinite inverse; its elements are multiplied by 0 in the end.
        inverse = (1.0 / (scales * decode)).clamp(max=_LARGEST_FP32)
        elements = E2M1.round(x * blocks.spread(inverse), uniform)
        return Quantized(elements * blocks.spread(scales), E2M1, elements, decode, scales)


class _Axis:
    """Blocks along one dimension of a matrix.

    A dimension whose pieces on other ranks share blocks with those here has numbered blocks: their
    amax is that over all ranks.
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
        """Give every element along a dimension the scale of its block."""
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
        """Return the largest magnitude of each block, [row blocks, blocks], on all ranks."""
        found = self._columns.amax(self.values.abs(), 1)
        if self._rows.block > 1:
            found = self._rows.amax(found, 0)
        for cut in (self._rows.cut if self._rows.block > 1 else None, self._columns.cut):
            if cut is not None:
                found = cut.largest(found)
        return found

    def spread(self, scales: Tensor) -> Tensor:
        """Give every element the scale of its block, [row blocks, blocks] -> [rows, k]."""
        if self._rows.block > 1:
            scales = self._rows.spread(scales, 0)
        return self._columns.spread(scales, 1)


# Kernels --------------------------------------------------------------------------------------

RANDOM = "random rounding"
TILES = "tiles"
SHARED_BLOCKS = "blocks that reach over to other ranks"
_ALL = frozenset({RANDOM, TILES, SHARED_BLOCKS})


def _needs(uniform: Tensor | None) -> set[str]:
    return set() if uniform is None else {RANDOM}


def _round_by_steps(
    format: ElementFormat, x: Tensor, scale: Tensor, uniform: Tensor | None
) -> Tensor:
    return format.round(in_working_dtype(x) * scale, uniform)


def _round_fused(
    format: ElementFormat, x: Tensor, scale: Tensor, _uniform: Tensor | None
) -> Tensor:
    run = triton_kernels.deferred("quantization", "round_scaled")
    out: Tensor = run(x, scale, format.largest, format.lowest_exponent, format.mantissa_bits)
    return out


def _quantize_by_steps(
    scaling: BlockScaling, x: Tensor, uniform: Tensor | None, cuts: Cuts
) -> Quantized:
    x = in_working_dtype(x)
    blocks = _Blocks(x, scaling.row_block_size, scaling.block_size, cuts)
    scales = scaling.block_scales(blocks.amax())
    spread = blocks.spread(scales)
    elements = scaling.format.round(x / spread, uniform)
    return Quantized(elements * spread, scaling.format, elements, None, scales)


def _quantize_fused(
    scaling: BlockScaling, x: Tensor, _uniform: Tensor | None, _cuts: Cuts
) -> Quantized:
    format = scaling.format
    exponents = format.lowest_exponent, format.highest_exponent
    values, elements, scales = triton_kernels.deferred("quantization", "quantize_blocks")(
        x, scaling.block_size, format.largest, exponents, format.mantissa_bits,
        scaling.is_e8m0, scaling.rounds_up,
    )  # fmt: skip
    return Quantized(values, format, elements, None, scales)


def round_to_scale(
    format: ElementFormat, x: Tensor, scale: Tensor, uniform: Tensor | None = None
) -> Tensor:
    """Multiply x [...] with scale [] and round: numbers of the format, fp32 (or fp64) [...]."""
    kernel = SCALED_ROUNDING.choose(Request.of(x, _needs(uniform))).kernel
    elements: Tensor = kernel.run(format, x, scale, uniform)
    return elements


def _table(operation: str, by_steps: Callable[..., Any], fused: Callable[..., Any]) -> KernelTable:
    steps = Kernel("steps", by_steps, _ALL)
    one_pass = Kernel(
        "triton", fused, dtypes=triton_kernels.DTYPES, missing=triton_kernels.missing, library=True
    )
    return KernelTable(operation, {"cpu": (steps,), OTHER_DEVICES: (one_pass, steps)})


SCALED_ROUNDING = _table("rounding with one scale", _round_by_steps, _round_fused)
"""Functions of (format, x [...], scale [], uniform) -> elements."""
BLOCK_QUANTIZATION = _table("quantization of blocks", _quantize_by_steps, _quantize_fused)
"""Functions of (scaling, x [rows, k], uniform, cuts) -> `Quantized`."""
