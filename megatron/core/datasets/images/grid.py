"""Positions of image patches: in the image, in windows of attention, and among tokens.

An image (or clip) is a grid of t x h x w patches, ordered block by block: the m x m patches of a
block follow each other and become one token of the language model. The blocks of a frame are
ordered row by row, as in Qwen2-VL's processor: P. Wang et al., "Qwen2-VL: Enhancing Vision-Language
Model's Perception of the World at Any Resolution", section 2.1, arXiv 2409.12191.

Legend: p patches of all images, m patches of a side of a block, i tokens of images = p / m^2.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

Grid = tuple[int, int, int]
"""(frames, rows, columns) of patches."""


def grids_of(image_grid_thw: Tensor | Iterable[Sequence[int]]) -> list[Grid]:
    """Return the rows of [images, 3] as grids."""
    rows = image_grid_thw.tolist() if isinstance(image_grid_thw, Tensor) else image_grid_thw
    return [(int(t), int(h), int(w)) for t, h, w in rows]


def num_image_tokens(grid: Grid, merge: int) -> int:
    """Return the number of language-model tokens of an image."""
    frames, rows, columns = grid
    return frames * rows * columns // merge**2


def _by_blocks(values: Tensor, merge: int) -> Tensor:
    """[h, w, ...] -> [h * w, ...] in the order of patches."""
    rows, columns, *rest = values.shape
    blocks = values.reshape(rows // merge, merge, columns // merge, merge, *rest)
    return blocks.transpose(1, 2).reshape(rows * columns, *rest)


def patch_positions(grids: Sequence[Grid], merge: int) -> Tensor:
    """Return the row and the column of each patch in its image, int64 [p, 2]."""
    found = []
    for frames, rows, columns in grids:
        both = torch.meshgrid(torch.arange(rows), torch.arange(columns), indexing="ij")
        found.append(_by_blocks(torch.stack(both, -1), merge).repeat(frames, 1))
    return torch.cat(found)


def frame_of_patches(grids: Sequence[Grid]) -> Tensor:
    """Return the number of each patch's frame, counted over all images: int32 [p]."""
    sizes = torch.tensor([h * w for t, h, w in grids for _ in range(t)])
    return torch.arange(len(sizes), dtype=torch.int32).repeat_interleave(sizes)


def windows(grids: Sequence[Grid], merge: int, side: int) -> tuple[Tensor, Tensor]:
    """Cut each frame into windows of side x side blocks, from its upper left corner.

    Args:
        side: blocks of a window's side.
    Returns:
        (order, int64 [i]: the number of each block, window by window; window of each of these
        blocks, int32 [i], counted over all images).
    """
    order, numbers, first, num_windows = [], [], 0, 0
    for t, h, w in grids:
        rows, columns = h // merge, w // merge
        across = -(-columns // side)
        row, column = torch.meshgrid(torch.arange(rows), torch.arange(columns), indexing="ij")
        of_frame = ((row // side) * across + column // side).flatten()
        in_frame = torch.argsort(of_frame, stable=True)
        count = -(-rows // side) * across
        for _ in range(t):
            order.append(in_frame + first)
            numbers.append(of_frame[in_frame] + num_windows)
            first, num_windows = first + rows * columns, num_windows + count
    return torch.cat(order), torch.cat(numbers).int()


def interpolation(grids: Sequence[Grid], merge: int, side: int) -> tuple[Tensor, Tensor]:
    """Return the bilinear interpolation of a table of side x side positions to each image.

    The corners of an image and of the table coincide.

    Returns:
        (rows of the table, int64 [p, 4]; their weights, fp32 [p, 4]).
    """
    found_rows, found_weights = [], []
    for t, h, w in grids:
        low, high, share = zip(*(_between(size, side) for size in (h, w)), strict=True)
        pairs = [(a, b) for a in (0, 1) for b in (0, 1)]
        rows = [
            (high if a else low)[0][:, None] * side + (high if b else low)[1][None, :]
            for a, b in pairs
        ]
        weights = [
            (share[0] if a else 1 - share[0])[:, None] * (share[1] if b else 1 - share[1])[None, :]
            for a, b in pairs
        ]
        found_rows.append(_by_blocks(torch.stack(rows, -1), merge).repeat(t, 1))
        found_weights.append(_by_blocks(torch.stack(weights, -1), merge).repeat(t, 1))
    return torch.cat(found_rows), torch.cat(found_weights)


def _between(size: int, side: int) -> tuple[Tensor, Tensor, Tensor]:
    """Spread `size` points over 0 ... side - 1; return the places around each, and its fraction."""
    points = torch.linspace(0, side - 1, size, dtype=torch.float32)
    low = points.long()
    return low, (low + 1).clamp(max=side - 1), points - low


def text_and_image_positions(
    is_image: Tensor, grids: Sequence[Grid], merge: int, first: int = 0
) -> Tensor:
    """Return the position of each token of a text with images in time, height and width.

    A token of text has the same position in all three. Frames, rows and columns of an image's
    blocks are counted from the position of the next token, and the text after the image continues
    after the largest position: "Qwen2-VL", section 2.1 (M-RoPE).

    Args:
        is_image: bool [s], True for a token of a block of an image.
        grids: of these images, in order.
    Returns:
        int64 [3, s].
    """
    pieces, place, waiting = [], 0, list(grids)
    marks = is_image.tolist()
    while place < len(marks):
        if marks[place] and waiting:
            t, h, w = waiting.pop(0)
            sizes = (t, h // merge, w // merge)
            axes = torch.meshgrid(*(torch.arange(size) for size in sizes), indexing="ij")
            pieces.append(torch.stack([axis.flatten() for axis in axes]) + first)
            place, first = place + pieces[-1].shape[1], first + max(sizes[1:])
            continue
        end = place + 1
        while end < len(marks) and not marks[end]:
            end += 1
        pieces.append((torch.arange(end - place) + first).expand(3, -1))
        place, first = end, first + end - place
    return torch.cat(pieces, 1)
