"""Recipes: which operand of a product is rounded to which format, and how it is scaled.

A linear layer has three products, of its input x [t, i], weight w [o, i] and output gradient
g [t, o]: forward x w^T contracts i, the input gradient g w contracts o, the weight gradient g^T x
contracts t. Blocks lie along the contracted dimension, so an operand of two products is rounded for
each of them, from the same unrounded tensor.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

from megatron.core.foundation.errors import ConfigError
from megatron.core.low_precision.formats import E4M3, E5M2, ElementFormat
from megatron.core.low_precision.scaling import (
    BlockScaling,
    Scaling,
    TensorScaling,
    TwoLevelScaling,
)

BLOCK = 128
MX_BLOCK = 32
NVFP4_BLOCK = 16


class Operand(Enum):
    """What a product multiplies."""

    INPUT = "input"
    WEIGHT = "weight"
    GRADIENT = "gradient"

    @property
    def index(self) -> int:
        """Place in the order in which they are named here."""
        return list(Operand).index(self)


@dataclass(frozen=True)
class Recipe:
    """How one layer's products are computed in few bits.

    Attributes:
        name: as the flags call it.
        scalings: of each operand.
        uses_history: amaxes are those of earlier steps; otherwise of the tensor itself.
        rounds_at_random: gradients are rounded at random, with the right expected value.
        rotates: operands of weight gradients go through a random Hadamard transform, which spreads
            outliers over their block.
    """

    name: str
    scalings: dict[Operand, Scaling]
    uses_history: bool = False
    rounds_at_random: bool = False
    rotates: bool = False


def fp8_recipe(kind: str, format: str, margin: int = 0) -> Recipe:
    """Return a recipe of 8-bit products.

    Args:
        kind: "delayed", "tensorwise", "blockwise" or "mxfp8".
        format: "e4m3" for all operands, or "hybrid": gradients, whose range is wider, in E5M2.
        margin: powers of two left free above the amax of earlier steps, for "delayed".
    """
    gradient = E5M2 if format == "hybrid" else E4M3

    def of(scalings: tuple[Scaling, Scaling, Scaling], uses_history: bool = False) -> Recipe:
        named = dict(zip(Operand, scalings, strict=True))
        return Recipe(kind, named, uses_history=uses_history)

    if kind == "delayed":
        forward = TensorScaling(E4M3, margin)
        return of((forward, forward, TensorScaling(gradient, margin)), uses_history=True)
    if kind == "tensorwise":
        return of((TensorScaling(E4M3), TensorScaling(E4M3), TensorScaling(gradient)))
    if kind == "blockwise":
        tile = BlockScaling(E4M3, BLOCK, row_block_size=BLOCK)
        return of((BlockScaling(E4M3, BLOCK), tile, BlockScaling(gradient, BLOCK)))
    if kind == "mxfp8":
        return of((_mx(E4M3), _mx(E4M3), _mx(gradient)))
    raise ConfigError(
        f"fp8_recipe={kind!r} has no recipe.",
        rule="it is delayed, tensorwise, blockwise or mxfp8",
        flags=["--fp8-recipe"],
        fix="use --fp8-recipe mxfp8",
    )


def _mx(format: ElementFormat) -> BlockScaling:
    return BlockScaling(format, MX_BLOCK, is_e8m0=True)


def fp4_recipe(kind: str) -> Recipe:
    """Return a recipe of 4-bit products: "nvfp4"."""
    if kind != "nvfp4":
        raise ConfigError(
            f"fp4_recipe={kind!r} has no recipe.",
            rule="it is nvfp4",
            flags=["--fp4-recipe"],
            fix="use --fp4-recipe nvfp4",
        )
    rows = TwoLevelScaling(NVFP4_BLOCK)
    tile = TwoLevelScaling(NVFP4_BLOCK, row_block_size=NVFP4_BLOCK)
    scalings: tuple[Scaling, Scaling, Scaling] = (rows, tile, rows)
    named = dict(zip(Operand, scalings, strict=True))
    return Recipe(kind, named, rounds_at_random=True, rotates=True)
