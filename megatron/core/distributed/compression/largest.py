"""The largest gradients of a bucket, as indices and values.

Y. Lin et al., "Deep Gradient Compression", section 3, arXiv 1712.01887. What is not sent is kept
and added to the next gradient (S. Karimireddy et al., arXiv 1901.09847). Momentum is that of the
optimizer, which sees the sums: nothing is corrected for it.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor


def num_sent(numel: int, fraction: float) -> int:
    """Return how many of `numel` gradients a rank sends."""
    return max(1, min(numel, math.ceil(fraction * numel)))


def take_largest(values: Tensor, count: int) -> Tensor:
    """Set the `count` largest of fp32 [n] to zero, and return them as uint8 [8 count].

    First come all int32 indices, then the fp32 values. NaN is larger than infinity, and both are
    larger than all others: what is not finite is sent.
    """
    indices = values.abs().topk(count, sorted=False).indices
    message = torch.empty(2, count, dtype=torch.int32, device=values.device)
    message[0].copy_(indices)
    message[1].copy_(values[indices].view(torch.int32))
    values[indices] = 0.0
    return message.view(-1).view(torch.uint8)


def add_sent(total: Tensor, message: Tensor) -> None:
    """Add what `take_largest` returned to fp32 [n]."""
    indices, values = message.view(torch.int32).view(2, -1)
    total[indices.long()] += values.view(torch.float32)
