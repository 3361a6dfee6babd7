"""Sums in rank order: the same bits on every rank, in every bucket, with and without sharding."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

STRETCH = 1 << 16
"""Elements that are added, scaled and written before the next ones: they stay in the cache."""


def piece_of(bucket: Tensor, rank: int, size: int) -> Tensor:
    """Return the rank-th of `size` equal pieces [n / size] of a flat tensor [n], as a view."""
    length = bucket.numel() // size
    return bucket[rank * length : (rank + 1) * length]


def is_half(tensor: Tensor) -> bool:
    return tensor.dtype in (torch.bfloat16, torch.float16)


def ordered_sum(terms: Sequence[Tensor], sums: Tensor, scale: float) -> None:
    """Leave scale * (t0 + t1 + ...) in `sums`, which may be one of `terms`.

    Half precision is added in fp32.

    Args:
        terms: each [n].
        sums: [n].
    """
    for begin in range(0, sums.numel(), STRETCH):
        parts = [term[begin : begin + STRETCH] for term in terms]
        out = sums[begin : begin + STRETCH]
        if is_half(sums):
            total = parts[0].float()
            for part in parts[1:]:
                total += part
            out.copy_(total.mul_(scale))
            continue
        # Only the last sum lands in `out`: a term that is there is read before or then.
        total = parts[0]
        between = torch.empty_like(out) if len(parts) > 2 else None
        for part in parts[1:-1]:
            total = torch.add(total, part, out=between)
        torch.add(total, parts[-1], out=out)
        if scale != 1.0:
            out.mul_(scale)
