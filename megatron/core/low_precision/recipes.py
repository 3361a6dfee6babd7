"""Recipes: the format and the scaling of each operand of a product.

A linear layer has three products, of its input x [t, i], weight w [o, i] and output gradient
g [t, o]: forward x w^T contracts i, the input gradient g w contracts o, the weight gradient g^T x
contracts t. Blocks lie along the contracted dimension, so an operand of two products is rounded
twice, each time from the unrounded tensor.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum

import torch

from megatron.core.foundation.errors import ConfigError
from megatron.core.low_precision.scaling import (
    BlockScaling,
    Scaling,
    TensorScaling,
    TwoLevelScaling,
)

E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
BLOCK = 128
MX_BLOCK = 32
NVFP4_BLOCK = 16


class Operand(Enum):
    """An operand of a layer's products."""

    INPUT = "input"
    WEIGHT = "weight"
    GRADIENT = "gradient"

    @property
    def index(self) -> int:
        """Column of this operand in an `AmaxHistory`."""
        return list(Operand).index(self)


@dataclass(frozen=True)
class Recipe:
    """How the operands of a layer's products are rounded.

    Attributes:
        name: the value of `--fp8-recipe` or `--fp4-recipe`.
        scalings: scaling of each operand.
        uses_history: scale by amaxes of earlier steps, not by the amax of the tensor.
        rounds_at_random: gradients are rounded stochastically, without bias.
        rotates: a random Hadamard transform spreads outliers of the weight gradient's operands
            over their block.
    """

    name: str
    scalings: dict[Operand, Scaling]
    uses_history: bool = False
    rounds_at_random: bool = False
    rotates: bool = False


def fp8_recipe(kind: str, format: str, margin: int = 0) -> Recipe:
    """Return an FP8 recipe.

    Args:
        kind: "delayed", "tensorwise", "blockwise" or "mxfp8".
        format: "e4m3" for all operands, or "hybrid": gradients in E5M2, which has more range.
        margin: for "delayed": spare powers of two above the amax of earlier steps.
    """
    gradient = E5M2 if format == "hybrid" else E4M3
    tile = BlockScaling(E4M3, BLOCK, row_block_size=BLOCK)
    of_kind: dict[str, Callable[[torch.dtype], Scaling]] = {
        "delayed": lambda dtype: TensorScaling(dtype, margin),
        "tensorwise": TensorScaling,
        "blockwise": lambda dtype: BlockScaling(dtype, BLOCK),
        "mxfp8": lambda dtype: BlockScaling(dtype, MX_BLOCK, is_e8m0=True),
    }
    if kind in of_kind:
        scaled = of_kind[kind]
        scalings = {
            Operand.INPUT: scaled(E4M3),
            Operand.WEIGHT: tile if kind == "blockwise" else scaled(E4M3),
            Operand.GRADIENT: scaled(gradient),
        }
        return Recipe(kind, scalings, uses_history=kind == "delayed")
    raise ConfigError(
        f"fp8_recipe={kind!r} has no recipe.",
        rule="it is delayed, tensorwise, blockwise or mxfp8",
        flags=["--fp8-recipe"],
        fix="use --fp8-recipe mxfp8",
    )


def fp4_recipe(kind: str) -> Recipe:
    """Return an FP4 recipe: "nvfp4"."""
    if kind != "nvfp4":
        raise ConfigError(
            f"fp4_recipe={kind!r} has no recipe.",
            rule="it is nvfp4",
            flags=["--fp4-recipe"],
            fix="use --fp4-recipe nvfp4",
        )
    rows = TwoLevelScaling(NVFP4_BLOCK)
    tile = TwoLevelScaling(NVFP4_BLOCK, row_block_size=NVFP4_BLOCK)
    scalings: dict[Operand, Scaling] = {
        Operand.INPUT: rows, Operand.WEIGHT: tile, Operand.GRADIENT: rows
    }  # fmt: skip
    return Recipe(kind, scalings, rounds_at_random=True, rotates=True)
