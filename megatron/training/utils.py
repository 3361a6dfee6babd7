"""Small functions of Megatron that scripts import from `megatron.training.utils`."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from megatron.core.context_parallel import get_batch_on_this_cp_rank
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.transport import torch_collectives
from megatron.core.utils import unwrap_model
from megatron.training.launch.printing import is_last_rank, is_rank_0, print_rank_0, print_rank_last
from megatron.training.metrics.params_norm import params_norm

__all__ = [
    "average_losses_across_data_parallel_group",
    "calc_params_l2_norm",
    "get_batch_on_this_cp_rank",
    "is_last_rank",
    "is_rank_0",
    "print_rank_0",
    "print_rank_last",
    "unwrap_model",
]


def average_losses_across_data_parallel_group(losses: Sequence[Tensor]) -> Tensor:
    """Return the mean of each loss over the data-parallel ranks, [number of losses]."""
    averaged = torch.cat([loss.detach().clone().view(1) for loss in losses])
    group = ProcessGroupCollection.current().dp
    return torch_collectives.all_reduce(averaged, group) / group.size()


def calc_params_l2_norm(model: nn.Module | Sequence[nn.Module]) -> float:
    """Return the norm of all weights of the model over all of its ranks."""
    chunks = [model] if isinstance(model, nn.Module) else list(model)
    return params_norm(chunks, ProcessGroupCollection.current())
