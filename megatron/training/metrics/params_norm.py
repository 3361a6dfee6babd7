"""The L2 norm of all weights of the model, each counted once in any layout."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor, nn

from megatron.core.distributed import DistributedDataParallel
from megatron.core.param_meta import get_param_meta
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.utils import get_pg_rank
from megatron.training.meeting import sum_over


def params_norm(model: Sequence[nn.Module], groups: ProcessGroupCollection) -> float:
    """Return the norm over all ranks of one replica.

    Communication:
        one all-reduce over tp x pp; where parameters are sharded, one over their shards before.
    """
    total = 0.0
    for chunk in model:
        shards_of: dict[nn.Parameter, list[Tensor]] = {}
        shard_group = None
        if isinstance(chunk, DistributedDataParallel):
            shards_of, shard_group = chunk.sharded_values(), chunk.mesh().shard
        sharded = 0.0
        for parameter in chunk.parameters():
            meta = get_param_meta(parameter)
            if meta.tied_to is not None:
                continue  # the original is counted where it lives
            is_copy = meta.split_axis is None and get_pg_rank(groups.tp) > 0
            if is_copy:
                continue
            if parameter in shards_of:
                sharded += sum(map(_sum_of_squares, shards_of[parameter]))
            else:
                total += _sum_of_squares(parameter.detach())
        total += sum_over([sharded], shard_group)[0] if shards_of else 0.0
    return math.sqrt(sum_over([total], groups.mp)[0])


def _sum_of_squares(values: Tensor) -> float:
    """Return the sum in fp64: there may be billions of small squares."""
    return float(torch.linalg.vector_norm(values, dtype=torch.float64)) ** 2
