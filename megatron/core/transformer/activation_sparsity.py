"""Sparse activations of an MLP: what exceeds an estimated quantile of a token's activations.

C. You et al., "Spark Transformer: Reactivating Sparsity in FFN and Attention", section 3
(statistical top-k), arXiv 2506.06644, as in Gemma 3n. A normal distribution with the mean and the
standard deviation of the token gives the quantile, so nothing is sorted.
"""

from __future__ import annotations

from statistics import NormalDist

import torch
from torch import Tensor

from megatron.core.tensor_parallel.mappings import (
    copy_to_tensor_model_parallel_region,
    reduce_from_tensor_model_parallel_region,
)
from megatron.core.topology.group import Group


def above_quantile(x: Tensor, share: float, tp_group: Group) -> Tensor:
    """Return relu(x - q) for x [s, b, f/tp], where q [s, b, 1] is the estimate of the quantile
    `share`, in (0, 1), of each token's f numbers.

    Communication: in forward and in backward two sums of s * b numbers over `tp_group`.
    """
    exact = x.to(torch.promote_types(x.dtype, torch.float32))
    mean = _mean(exact, tp_group)
    # The variance is least at the mean, so the mean gets no gradient from it. The bound keeps the
    # derivative of the root finite where all numbers of a token are equal.
    variance = _mean((exact - mean.detach()).square(), tp_group)
    quantile = mean + variance.clamp(min=1e-30).sqrt() * NormalDist().inv_cdf(share)
    return torch.relu(exact - quantile).to(x.dtype)


def _mean(x: Tensor, tp_group: Group) -> Tensor:
    total = reduce_from_tensor_model_parallel_region(x.mean(-1, keepdim=True), group=tp_group)
    # Each rank has a part of the gradient of the sum, so backward adds them up as well.
    return copy_to_tensor_model_parallel_region(total, group=tp_group) / tp_group.size()
