"""Set the callbacks in the model's config that the schedules of `megatron.core` call."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

from torch import nn

from megatron.core.distributed import DistributedDataParallel, finalize_model_grads
from megatron.core.optimizer.optimizer import MegatronOptimizer
from megatron.core.pipeline_parallel.schedule_definitions import schedule_named
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.timers import Timers
from megatron.core.utils import get_model_config
from megatron.training.config.resolved import ResolvedRun


def install_callbacks(
    run: ResolvedRun,
    model: Sequence[nn.Module],
    optimizer: MegatronOptimizer | None,
    groups: ProcessGroupCollection,
    timers: Timers,
) -> Any:
    """Set the callbacks in the config of every chunk; return the first chunk's config."""
    wrapped = [chunk for chunk in model if isinstance(chunk, DistributedDataParallel)]
    for config in {id(c): c for c in map(get_model_config, model)}.values():
        config.timers = timers if run.logging.timing_log_level > 0 else None
        config.finalize_model_grads_func = partial(finalize_model_grads, pg_collection=groups)
        if optimizer is not None:
            config.grad_scale_func = optimizer.scale_loss
        if run.ddp.overlap_grad_reduce and wrapped:
            config.no_sync_func = _one_or_list([chunk.no_sync for chunk in wrapped])
            # The hooks of a backward pass without weight gradients cannot start their reduction,
            # so the schedule starts it.
            splits_backward = schedule_named(run.parallelism.pipeline_schedule).splits_backward
            if run.ddp.align_grad_reduce or splits_backward:
                config.grad_sync_func = _one_or_list([chunk.start_grad_sync for chunk in wrapped])
    return get_model_config(model[0])


def _one_or_list(functions: list[Any]) -> Any:
    """Return the function of a single chunk, or the list for several, as schedules expect."""
    return functions[0] if len(functions) == 1 else functions
