"""The L2 norm of all weights of the model, each counted once in any layout."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import nn

from megatron.core.param_meta import get_param_meta
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.utils import get_pg_rank
from megatron.training.meeting import sum_over


def params_norm(model: Sequence[nn.Module], groups: ProcessGroupCollection) -> float:
    """Return the norm over all ranks of one replica.

    Communication:
        one all-reduce over tp x pp.
    """
    total = 0.0
    for chunk in model:
        for parameter in chunk.parameters():
            meta = get_param_meta(parameter)
            if meta.tied_to is not None:
                continue  # the original is counted where it lives
            is_copy = meta.split_axis is None and get_pg_rank(groups.tp) > 0
            if not is_copy:
                # fp64 sums: billions of squares of small weights.
                total += (
                    float(torch.linalg.vector_norm(parameter.detach(), dtype=torch.float64)) ** 2
                )
    return math.sqrt(sum_over([total], groups.mp)[0])
