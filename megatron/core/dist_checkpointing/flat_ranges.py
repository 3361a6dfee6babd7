"""Boxes of a flattened range: how a ZeRO shard of an n-d parameter is still made of slices.

Sharded optimizers cut a flattened parameter anywhere. A run [begin, end) of the row-major order
of an n-d box is a short list of boxes (at most 2n - 1), each contiguous in that run. So every
shard on disk is a box of the full tensor and can be read in any layout.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

Box = tuple[tuple[int, ...], tuple[int, ...]]
"""(offset, shape), both with one entry per dimension."""


def boxes_of_flat_range(shape: Sequence[int], begin: int, end: int) -> list[Box]:
    """Cut the elements begin..end-1 of a row-major tensor of `shape` into boxes.

    The boxes come in memory order and do not overlap; joined, they are exactly the range. A
    scalar (shape ()) has one element and one box.
    """
    total = math.prod(shape)
    assert 0 <= begin <= end <= total, (tuple(shape), begin, end)
    if begin == end:
        return []
    if begin == 0 and end == total:
        return [((0,) * len(shape), tuple(shape))]
    inner_shape = tuple(shape[1:])
    inner = math.prod(inner_shape)
    first, skip = divmod(begin, inner)
    last, rest = divmod(end, inner)
    if first == last:
        return _within_row(first, inner_shape, skip, rest)
    boxes = []
    if skip:
        boxes += _within_row(first, inner_shape, skip, inner)
        first += 1
    if first < last:
        boxes.append(((first, *(0,) * len(inner_shape)), (last - first, *inner_shape)))
    if rest:
        boxes += _within_row(last, inner_shape, 0, rest)
    return boxes


def _within_row(row: int, inner_shape: tuple[int, ...], begin: int, end: int) -> list[Box]:
    return [
        ((row, *offset), (1, *size))
        for offset, size in boxes_of_flat_range(inner_shape, begin, end)
    ]


def intersection(a: Box, b: Box) -> Box | None:
    """Return the box that two boxes share, or None if it is empty."""
    offset = tuple(max(x, y) for x, y in zip(a[0], b[0], strict=True))
    shape = tuple(
        min(x + n, y + m) - o for x, n, y, m, o in zip(a[0], a[1], b[0], b[1], offset, strict=True)
    )
    return (offset, shape) if all(n > 0 for n in shape) else None
