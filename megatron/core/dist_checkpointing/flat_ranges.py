"""Boxes of a flattened range: a ZeRO shard of an n-d parameter as a list of slices.

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

    The boxes are in memory order and do not overlap; joined, they are exactly the range. A
    scalar (shape ()) has one element and one box.
    """
    total = math.prod(shape)
    if not 0 <= begin <= end <= total:
        raise ValueError(f"elements {begin}:{end} are not within a tensor of shape {tuple(shape)}")
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


def boxes_of_shard(
    shape: Sequence[int],
    dim: int | None,
    *,
    rank: int,
    size: int,
    stride: int = 1,
    flat_range: tuple[int, int] | None = None,
) -> list[tuple[Box, tuple[int, ...]]]:
    """Return the boxes of one rank's shard, with their offsets in the tensor that is split.

    A tensor of `stride` equal parts along `dim` ([gate; up] of a gated MLP) is split part by part:
    block i of the shard is piece i * size + rank of the tensor. Without `dim` the tensor is whole.

    Args:
        shape: of the shard; `stride` divides the size of `dim`.
        rank, size: of the group that splits `dim`.
        flat_range: [begin, end) of the flattened shard, if the rank holds only this range.
    Returns:
        (box within the shard, its offset in the full tensor), in memory order of the boxes of
        `flat_range`, then by block.
    """
    flat_boxes = boxes_of_flat_range(shape, *(flat_range or (0, math.prod(shape))))
    if dim is None:
        return [(box, box[0]) for box in flat_boxes]
    block = shape[dim] // stride
    low, high = [0] * len(shape), list(shape)
    high[dim] = block
    found = []
    for held in flat_boxes:
        for i in range(stride):
            low[dim] = i * block
            shared = intersection(held, (tuple(low), tuple(high)))
            if shared is None:
                continue
            offset = list(shared[0])
            offset[dim] += (i * size + rank - i) * block
            found.append((shared, tuple(offset)))
    return found


def intersection(a: Box, b: Box) -> Box | None:
    """Return the box that two boxes share, or None if it is empty."""
    offset = tuple(max(x, y) for x, y in zip(a[0], b[0], strict=True))
    shape = tuple(
        min(x + n, y + m) - o for x, n, y, m, o in zip(a[0], a[1], b[0], b[1], offset, strict=True)
    )
    return (offset, shape) if all(n > 0 for n in shape) else None


def find_overlap(boxes: Sequence[Box]) -> tuple[Box, Box] | None:
    """Return two boxes that share an element, or None if all are disjoint.

    Boxes are separated axis by axis; only clusters that no axis separates are compared in pairs,
    so a stack of many layers cut in many pieces stays cheap.

    Raises:
        UnprovenError: the boxes are so irregular that the check would take too long. No layout of
            ranks makes such boxes.
    """
    clusters = [list(boxes)]
    axes = range(len(boxes[0][0]) if boxes else 0)
    # A grid of pieces is separated once by every axis, and each separation may try all axes.
    budget = _FREE_STEPS + len(boxes) * len(axes) * (len(axes) + 1)
    while clusters:
        cluster = clusters.pop()
        if len(cluster) < 2:
            continue
        for axis in axes:
            budget -= len(cluster)
            parts = _separate(cluster, axis) if budget >= 0 else []
            if len(parts) > 1:
                clusters += parts
                break
        else:
            # Compare in pairs: in a legal checkpoint such clusters are small.
            budget -= len(cluster) * (len(cluster) - 1) // 2
            if budget < 0:
                raise UnprovenError(f"{len(boxes)} shards are cut in too irregular a way")
            for i, a in enumerate(cluster):
                for b in cluster[:i]:
                    if intersection(a, b) is not None:
                        return b, a
    return None


class UnprovenError(Exception):
    """Checking whether the boxes are disjoint would take too long."""


_FREE_STEPS = 1_000_000
"""Boxes examined or pairs compared: about a second."""


def _separate(boxes: list[Box], axis: int) -> list[list[Box]]:
    """Group boxes whose intervals on one axis are connected; empty boxes are dropped."""
    parts: list[list[Box]] = []
    reach = -1
    for box in sorted(boxes, key=lambda b: b[0][axis]):
        begin, length = box[0][axis], box[1][axis]
        if length == 0:
            continue
        if begin >= reach:
            parts.append([])
        parts[-1].append(box)
        reach = max(reach, begin + length)
    return parts


def describe_box(box: Box) -> str:
    """Return a box as index text: [0:4, 8:16]."""
    return "[" + ", ".join(f"{o}:{o + n}" for o, n in zip(*box, strict=True)) + "]"


def coverage_problem(shape: Sequence[int], boxes: Sequence[Box]) -> str | None:
    """Return why `boxes` are not a partition of a tensor of `shape`; None if they are one."""
    for offset, size in boxes:
        inside = all(
            o >= 0 and n >= 0 and o + n <= full
            for o, n, full in zip(offset, size, shape, strict=True)
        )
        if not inside:
            return f"shard {describe_box((offset, size))} is outside of shape {tuple(shape)}"
    try:
        overlap = find_overlap(boxes)
    except UnprovenError as error:
        return f"{error} to prove that they do not overlap"
    if overlap is not None:
        return f"shards {describe_box(overlap[0])} and {describe_box(overlap[1])} overlap"
    covered, full = sum(math.prod(size) for _, size in boxes), math.prod(shape)
    if covered != full:
        return f"shards cover {covered} of {full} elements of shape {tuple(shape)}"
    return None
