"""The L2 norm of all weights of the model; each weight counts once in any layout."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor, nn

from megatron.core.distributed import DistributedDataParallel
from megatron.core.optimizer.gradient_norm import is_counted_on_rank, without_padding
from megatron.core.parameters.param_meta import get_param_meta, num_elements_before_padding
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.transport.object_collectives import sum_across_ranks


def params_norm(model: Sequence[nn.Module], groups: ProcessGroupCollection) -> float:
    """Return the norm over all ranks of one replica, without padding rows of the vocabulary.

    Communication:
        waits for an overlapped gather of updated parameters. Then one all-reduce over the
        model-parallel ranks for dense parameters and one for experts; sharded parameters need an
        additional all-reduce over their shards.
    """
    total = 0.0
    for is_expert, across in ((False, groups.mp), (True, groups.tp_ep_pp)):
        squares = sum(_of_chunk(chunk, groups, is_expert=is_expert) for chunk in model)
        total += sum_across_ranks([squares], across)[0]
    return math.sqrt(total)


def _of_chunk(chunk: nn.Module, groups: ProcessGroupCollection, *, is_expert: bool) -> float:
    """Return the sum of squares of a chunk's dense or expert parameters."""
    wrapper = chunk if isinstance(chunk, DistributedDataParallel) else None
    if wrapper is not None:
        wrapper.finish_param_sync()  # an overlapped gather would end in the next forward pass
    are_sharded = set() if wrapper is None else set(wrapper.sharded_values())
    full = sharded = 0.0
    for parameter in chunk.parameters():
        meta = get_param_meta(parameter)
        if meta.is_expert != is_expert or not is_counted_on_rank(parameter, groups):
            continue
        if wrapper is not None and parameter in are_sharded:
            for shard in wrapper.shards_of(parameter):
                sharded += _sum_of_squares(without_padding(shard, shard.values.detach(), groups))
        else:
            axis_rank = (groups.expt_tp if is_expert else groups.tp).rank()
            end = num_elements_before_padding(parameter, meta, axis_rank)
            full += _sum_of_squares(parameter.detach().reshape(-1)[:end])
    if wrapper is not None and are_sharded:
        sharded = sum_across_ranks([sharded], wrapper.mesh(is_expert).shard)[0]
    return full + sharded


def _sum_of_squares(values: Tensor) -> float:
    """Return the sum, computed in fp64 because there may be billions of small squares."""
    return float(torch.linalg.vector_norm(values, dtype=torch.float64)) ** 2
