"""Sums whose bits do not depend on the order of their terms.

Every term is rounded to a multiple of `GRID` before it is added. Sums of such multiples are exact
in fp64 as long as they are smaller than `LIMIT`, and exact sums have no order: micro batches,
replicas, pieces of a sequence and pipeline stages may add their gradients whenever they have them,
in any number. The error of a term is at most GRID / 2, whatever its size.

J. Demmel, H. D. Nguyen, "Parallel Reproducible Summation", section 4 (pre-rounding), IEEE
Transactions on Computers 64(7), 2015.
"""

from __future__ import annotations

import torch
from torch import Tensor

from megatron.core.foundation.device import prefers_cache_blocks

GRID = 2.0**-44
"""Gradients of a mean loss below it are rounded to 0: 5.7e-14. Adam's epsilon is 1e-8."""
LIMIT = 2.0**8
"""Largest magnitude of an exact sum: fp64 has 52 bits below it, one of them is left."""
LOSS_GRID = 2.0**-24
"""Losses of tokens are rounded to its multiples: their sums are exact below 2^29."""
_PART = 2**16
_SHIFT = 1.5 * 2.0**52


def on_grid(x: Tensor, grid: float = GRID) -> Tensor:
    """Return x [...] in fp64, rounded to multiples of `grid`; NaN and infinity stay.

    Adding the shift pushes all bits below the grid out of the significand.
    """
    return x.to(torch.float64, copy=True).add_(_SHIFT * grid).sub_(_SHIFT * grid)


def add_on_grid(sums: Tensor, terms: Tensor, *, is_first: bool) -> None:
    """Add terms [...], rounded to multiples of `GRID`, to exact sums [...], or overwrite them."""
    for total, term in zip(_parts(sums.view(-1)), _parts(terms.reshape(-1)), strict=True):
        if is_first:
            total.copy_(on_grid(term))
        else:
            total.add_(on_grid(term))


def row_sum(rows: Tensor) -> Tensor:
    """Return the exact sum of the rows [t, ...], fp64 [...]."""
    return on_grid(rows).sum(0)


def round_sums(sums: Tensor, factor: float) -> None:
    """Multiply exact sums [...] by a factor and round them to fp32 values, in place.

    A sum beyond `LIMIT` becomes NaN: its bits may depend on the order of its terms.
    """
    for part in _parts(sums.view(-1)):
        rounded = torch.empty(part.shape, dtype=torch.float32, device=part.device)
        torch.mul(part, factor, out=rounded)
        part.copy_(rounded.masked_fill_(rounded.abs() > LIMIT * factor, torch.nan))


def _parts(flat: Tensor) -> tuple[Tensor, ...]:
    """Return parts of a flat tensor [n] that stay in the cache from one operation to the next."""
    return flat.split(_PART) if prefers_cache_blocks(flat.device) else (flat,)
