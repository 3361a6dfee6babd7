"""The random Hadamard transform, and bits for stochastic rounding that no layout changes."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from megatron.core.parameters.rng import derive_seed

HADAMARD_SIZE = 16
_SIGNS = 0b1011_0010_1110_0100
"""Bit i negates element i of 16: drawn once, the same for all layers and steps."""


def hash_bits(x: Tensor) -> Tensor:
    """Mix the 32 bits of x [...], int32: every bit of the input changes half of the output.

    Multiply and xor-shift, the finalizer of A. Appleby's MurmurHash3.
    """
    x = x ^ _shifted(x, 16)
    x = x * -2048144789  # 0x85ebca6b
    x = x ^ _shifted(x, 13)
    x = x * -1028477387  # 0xc2b2ae35
    return x ^ _shifted(x, 16)


def _shifted(x: Tensor, bits: int) -> Tensor:
    return (x >> bits) & ((1 << (32 - bits)) - 1)


def row_keys(key: Sequence[int | str], *rows: Tensor) -> Tensor:
    """Hash the numbers that identify each token, int64 [t] each, under a key: int32 [t]."""
    found = torch.full_like(rows[0], derive_seed(*key) & 0x7FFF_FFFF, dtype=torch.int32)
    for part in rows:
        for half in (part & 0x7FFF_FFFF, part >> 31):
            found = hash_bits(found ^ hash_bits(half.to(torch.int32) + 0x3C6E_F372))
    return found


def uniform(keys: Tensor, columns: Tensor) -> Tensor:
    """Return numbers in [0, 1), fp32 [t, k], each from its token's key and its column.

    Args:
        keys: int32 [t].
        columns: int64 [k], columns of the whole tensor.
    """
    bits = hash_bits(keys[:, None] ^ hash_bits(columns.to(torch.int32) + 1)[None, :])
    return _shifted(bits, 8).float().mul_(2.0**-24)


def rotate(x: Tensor) -> Tensor:
    """Multiply runs of 16 elements of x [rows, k] by a Hadamard matrix with random signs.

    The matrix is orthogonal: applied to both operands along the contracted dimension, it does not
    change their product. R. Ashkboos et al., "QuaRot", section 3, arXiv 2404.00456.

    Returns:
        [rows, k], k padded with zeros to a multiple of 16.
    """
    missing = -x.shape[1] % HADAMARD_SIZE
    x = F.pad(x, (0, missing)) if missing else x
    signs = [-1.0 if _SIGNS >> place & 1 else 1.0 for place in range(HADAMARD_SIZE)]
    runs = x.view(x.shape[0], -1, HADAMARD_SIZE) * x.new_tensor(signs)
    # Sums and differences in a fixed order: the same bits whatever the number of rows.
    width = 1
    while width < HADAMARD_SIZE:
        pairs = runs.view(*x.shape[:1], -1, 2, width)
        runs = torch.stack((pairs[:, :, 0] + pairs[:, :, 1], pairs[:, :, 0] - pairs[:, :, 1]), 2)
        width *= 2
    return runs.reshape(x.shape).mul_(HADAMARD_SIZE**-0.5)
