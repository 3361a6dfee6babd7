"""Sums whose bits do not depend on the order of their terms.

Every term is rounded to a multiple of `GRID` before it is added. Sums of such multiples are exact
in fp64 as long as they are smaller than `LIMIT`, and exact sums have no order: micro batches,
replicas, pieces of a sequence and pipeline stages may add their gradients whenever they have them,
in any number. The error of a term is at most GRID / 2, whatever its size.

J. Demmel, H. D. Nguyen, "Parallel Reproducible Summation", section 4 (pre-rounding), IEEE
Transactions on Computers 64(7), 2015.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from megatron.core.foundation.device import prefers_cache_blocks

GRID = 2.0**-44
"""Gradients of a mean loss below it are rounded to 0: 5.7e-14. Adam's epsilon is 1e-8."""
LIMIT = 2.0**8
"""Largest magnitude of an exact sum: fp64 has 52 bits below it, one of them is left."""
LOSS_GRID = 2.0**-24
"""Losses of tokens are rounded to its multiples: their sums are exact below 2^29."""
_PART = 2**17
_SHIFT = 1.5 * 2.0**52


def on_grid(x: Tensor, grid: float = GRID) -> Tensor:
    """Return x [...] in fp64, rounded to multiples of `grid`; NaN and infinity stay.

    Adding the shift pushes all bits below the grid out of the significand.
    """
    return x.to(torch.float64, copy=True).add_(_SHIFT * grid).sub_(_SHIFT * grid)


def add_on_grid(sums: Tensor, terms: Tensor, *, is_first: bool) -> None:
    """Add terms [...], rounded to multiples of `GRID`, to exact sums [...], or overwrite them."""
    if sums.is_contiguous():
        sums, terms = sums.view(-1), terms.reshape(-1)
    for total, term in zip(_parts(sums), _parts(terms), strict=True):
        if is_first:
            shifted = term.to(torch.float64, copy=True).add_(_SHIFT * GRID)
            torch.sub(shifted, _SHIFT * GRID, out=total)
        else:
            total.add_(on_grid(term))


def row_sum(rows: Tensor) -> Tensor:
    """Return the exact sum of the rows [t, ...], fp64 [...]."""
    sums = [on_grid(part).sum(0) for part in _parts(rows)]
    return sums[0] if len(sums) == 1 else torch.stack(sums).sum(0)


def round_sums(sums: Tensor, factor: float) -> None:
    """Multiply exact sums [n] by a factor and round them to fp32 values, in place.

    A sum beyond `LIMIT` (to less than its double) becomes infinite: its bits may depend on the
    order of its terms. A power of two moves such a sum out of the range of fp32.
    """
    power = 2.0 ** (128 - math.ceil(math.log2(LIMIT * factor)))
    for part in _parts(sums):
        part.copy_(torch.mul(part, factor * power).float()).mul_(1 / power)


def in_own_memory(sums: Tensor) -> Tensor:
    """Convert sums [...] to fp32 in the first half of their memory: the sums are lost."""
    flat = sums.reshape(-1)
    values = flat.view(torch.float32)[: flat.numel()]
    # Ascending: a part is written to memory that has been read.
    for value, part in zip(_parts(values), _parts(flat), strict=True):
        value.copy_(part.float())
    return values.view(sums.shape)


def _parts(x: Tensor) -> Sequence[Tensor]:
    """Return parts of x [n, ...] that stay in the cache from one operation to the next."""
    is_small = x.numel() <= _PART or not prefers_cache_blocks(x.device)
    return [x] if is_small else x.chunk(-(-x.numel() // _PART))
