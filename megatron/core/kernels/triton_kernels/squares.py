"""Sums of squares of parts of a flat tensor, for the norm of the gradient."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

NUM_WARPS = 8


@triton.jit
def squares_kernel(x_ptr, begins_ptr, out_ptr, BLOCKS: tl.constexpr):
    """Sum the squares of one part: in fp32 inside blocks of 128 elements, then in fp64."""
    part = tl.program_id(0)
    begin = tl.load(begins_ptr + part)
    blocks = tl.arange(0, BLOCKS)[:, None]
    inside = blocks < tl.load(begins_ptr + part + 1) - begin
    places = begin * 128 + blocks * 128 + tl.arange(0, 128)[None, :]
    x = tl.load(x_ptr + places, mask=inside, other=0.0).to(tl.float32)
    tl.store(out_ptr + part, tl.sum(tl.sum(x * x, axis=1).to(tl.float64), axis=0))


def segment_squares(
    flat: Tensor, segments: tuple[Tensor, Tensor, Tensor, int], _exactly: bool
) -> Tensor:
    """Return the sums of squares of consecutive segments, fp64 [segments].

    Args:
        flat: [blocks * 128].
        segments: blocks of each segment, unused here; int64 [parts + 1], the first block of each
            part of a segment, and the end of the last one; int64 [segments], the parts of each
            segment; the maximum blocks of a part, a power of two.
    """
    _, begins, num_parts, most_blocks = segments
    sums = torch.empty(begins.numel() - 1, dtype=torch.float64, device=flat.device)
    squares_kernel[sums.shape](flat, begins, sums, BLOCKS=most_blocks, num_warps=NUM_WARPS)
    return torch.segment_reduce(sums, "sum", lengths=num_parts, unsafe=True)
