"""Copies of weights for products with few rows, which generation on a CPU computes.

A product with a handful of rows spends most of its time rearranging the weight for the processor's
vector units. oneDNN can keep a rearranged weight. For one row the fastest layout is [i, o], read
once from its beginning to its end. Measured on one core, all products of a step of a model of 135
million parameters in fp32: with 1 row 47 ms without a copy, 39 ms rearranged, 32 ms as [i, o] (a
mere sum over all weights takes 22 ms); with 8 rows 80 ms, 40 ms and 112 ms. The copy needs as much
memory as the weight.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

MAX_ROWS = 256
"""Largest measured number: a product with 256 rows takes 0.78 of the time without the copy."""
_ROWS_MEANT = 16
"""Rows for which oneDNN packs: at 8 rows, 8 and 32 cost 10 to 33 % more, 1 costs 67 % more."""
_DTYPES = (torch.float32, torch.bfloat16)


class PrepackedWeight:
    """A rearranged copy of a weight, used until the weight changes.

    Args:
        weight: [o, i] on the CPU.
        is_for_one_row: store it as [i, o], for products with a single row.
    """

    def __init__(self, weight: Tensor, is_for_one_row: bool) -> None:
        own = weight.detach()
        self._as_columns: Tensor | None = None
        self._packed: Tensor | None = None
        if is_for_one_row and weight.dtype == torch.float32:
            self._as_columns = own.t().contiguous()
        else:
            self._packed = torch.ops.mkldnn._reorder_linear_weight(own, _ROWS_MEANT)
        self._max_rows = MAX_ROWS if self._as_columns is None else 1
        self._state = _state_of(weight)

    def fits(self, x: Tensor, weight: Tensor) -> bool:
        """Whether a product of x with `weight` may use the copy."""
        few = x.numel() <= self._max_rows * x.shape[-1]
        return few and x.dtype == weight.dtype and self._state == _state_of(weight)

    def product(self, x: Tensor, bias: Tensor | None) -> Tensor:
        """Return x @ weight.T + bias for x [..., i]."""
        rows = x.reshape(-1, x.shape[-1])
        if self._as_columns is not None:
            out = torch.mm(rows, self._as_columns)
            return (out if bias is None else out.add_(bias)).view(*x.shape[:-1], -1)
        out = torch.ops.mkldnn._linear_pointwise(rows, self._packed, bias, "none", [], "")
        return out.view(*x.shape[:-1], -1)


def _state_of(weight: Tensor) -> tuple[int, int]:
    return weight.data_ptr(), weight._version


def prepack(weight: Tensor, *, is_for_one_row: bool = False) -> bool:
    """Attach a rearranged copy to a weight; return False if torch cannot make one here.

    Args:
        is_for_one_row: products will have one row instead of many.

    `drop_prepacked` frees the copy. It is not used once the weight has changed.
    """
    if weight.device.type != "cpu" or weight.dtype not in _DTYPES or weight.dim() != 2:
        return False
    try:
        weight.prepacked_weight = PrepackedWeight(weight, is_for_one_row)  # type: ignore[attr-defined]
    except (AttributeError, RuntimeError):  # a build of torch without oneDNN
        return False
    return True


def drop_prepacked(weight: Tensor) -> None:
    """Free the copy."""
    weight.prepacked_weight = None  # type: ignore[attr-defined]


def linear(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """Return x [..., i] @ weight.T [i, o] + bias [o].

    The product uses the weight's copy if there is one and gradients are disabled.
    """
    packed: Any = getattr(weight, "prepacked_weight", None)
    if packed is not None and not torch.is_grad_enabled() and packed.fits(x, weight):
        return packed.product(x, bias)
    return F.linear(x, weight, bias)
