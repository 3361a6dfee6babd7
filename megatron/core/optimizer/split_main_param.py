"""fp32 main weights as bf16 model weights and the 16 bits that those lack.

A bf16 number is the upper half of an fp32 number. Where the model keeps the upper half of the main
weight, rounded, the optimizer need only keep the difference: two bytes instead of four, and no bit
lost. Exact ties are rounded away from zero, not to even, because the difference must fit 16 bits.
"""

from __future__ import annotations

import torch
from torch import Tensor


def split_remainder(main: Tensor) -> tuple[Tensor, Tensor]:
    """Return (upper, lower): the nearest bf16 numbers, and int16 differences in fp32 bits.

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
