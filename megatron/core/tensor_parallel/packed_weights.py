"""Weights laid out for products with few rows, as generation on a CPU has them.

A product with a handful of rows spends most of its time rearranging the weight for the processor's
vector units. oneDNN can keep a weight rearranged: measured on one core, a 3072 x 576 product in
fp32 takes 0.6 of its time with 8 rows, 0.8 with 1 or 64. The copy costs the weight's memory again.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

MAX_ROWS = 64
"""With more rows the rearranging no longer matters."""
_ROWS_MEANT = 32
"""What oneDNN is told. The layout for several rows is also the best for one; that for one row costs
more than none with several."""
_DTYPES = (torch.float32, torch.bfloat16)


class PackedWeight:
    """A rearranged copy of a weight, used as long as the weight is what it was.

    Args:
        weight: [o, i] on the CPU.
    """

    def __init__(self, weight: Tensor) -> None:
        self._packed: Tensor = torch.ops.mkldnn._reorder_linear_weight(weight.detach(), _ROWS_MEANT)
        self._state = _state_of(weight)

    def fits(self, x: Tensor, weight: Tensor) -> bool:
        """Whether a product of x with `weight` may use the copy."""
        few = x.numel() <= MAX_ROWS * x.shape[-1]
        return few and x.dtype == weight.dtype and self._state == _state_of(weight)

    def product(self, x: Tensor, bias: Tensor | None) -> Tensor:
        """Return x @ weight.T + bias for x [..., i]."""
        rows = x.reshape(-1, x.shape[-1])
        out = torch.ops.mkldnn._linear_pointwise(rows, self._packed, bias, "none", [], "")
        return out.view(*x.shape[:-1], -1)


def _state_of(weight: Tensor) -> tuple[int, int]:
    return weight.data_ptr(), weight._version


def pack(weight: Tensor) -> bool:
    """Give a weight a rearranged copy; return whether this machine and torch can.

    The copy is forgotten with `unpack`, and not used once the weight has changed.
    """
    if weight.device.type != "cpu" or weight.dtype not in _DTYPES or weight.dim() != 2:
        return False
    try:
        weight.packed_weight = PackedWeight(weight)  # type: ignore[attr-defined]
    except (AttributeError, RuntimeError):  # a build of torch without oneDNN
        return False
    return True


def unpack(weight: Tensor) -> None:
    """Forget the copy."""
    weight.packed_weight = None  # type: ignore[attr-defined]


def linear(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """Return x @ weight.T + bias, through the weight's copy where there is one and no gradient."""
    packed: Any = getattr(weight, "packed_weight", None)
    if packed is not None and not torch.is_grad_enabled() and packed.fits(x, weight):
        return packed.product(x, bias)
    return F.linear(x, weight, bias)
