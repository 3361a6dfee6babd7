"""Count, before a step, the tokens that its loss will be divided by.

Losses inside the model are means over micro batches. Under --calculate-per-token-loss all gradients
are divided by the tokens of the loss of the whole step, so these losses are multiplied by that
number before. It is known only once all micro batches have been read.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from megatron.core.foundation import device
from megatron.core.transport import backend
from megatron.core.utils import as_list
from megatron.training.run.context import StepPlan, TrainingContext


def with_loss_tokens(
    context: TrainingContext, data: Any, plan: StepPlan
) -> tuple[Any, Tensor | None]:
    """Read the micro batches of a step, if the model has losses inside, and count their tokens.

    Returns:
        (iterators over the micro batches, tokens of the loss of all replicas divided by their micro
        batches, []; None where there are no such losses, or micro batches have no `loss_mask`).
    Communication:
        two maxima and a sum of two numbers, over `pp`, `tp` and `dp_cp`.
    """
    config, groups, iterators = context.config, context.groups, as_list(data)
    of_routers = config.num_moe_experts and (config.balance_losses() or config.moe_z_loss_coeff)
    if not (of_routers or config.trains_indexer):
        return data, None
    read = [list(itertools.islice(it or (), plan.num_microbatches)) for it in iterators]
    counted = torch.zeros(2, dtype=torch.float64)
    for batch in max(read, key=len, default=[]):
        mask = batch.get("loss_mask") if isinstance(batch, Mapping) else None
        if mask is not None:
            sharing = int(batch.get("local_cp_size", groups.cp.size()))
            counted += torch.stack((mask.sum(dtype=torch.float64).cpu(), torch.ones(()))) / sharing
    counted = counted.to(device.current_device())
    for group in (groups.pp, groups.tp):  # a stage, or a rank, may read no data
        backend.all_reduce(counted, group, dist.ReduceOp.MAX)
    backend.all_reduce(counted, groups.dp_cp)
    known: list[Any] = [
        None if it is None else itertools.chain(batches, it)
        for it, batches in zip(iterators, read, strict=True)
    ]
    found = None
    if counted[1]:
        num_microbatches = plan.global_batch_size // plan.micro_batch_size
        found = (counted[0].clamp(min=1) / num_microbatches).float()
    return known if isinstance(data, list) else known[0], found
