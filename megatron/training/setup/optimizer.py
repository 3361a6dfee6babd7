"""Build the optimizer and the schedules of learning rate and weight decay."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import nn

from megatron.core.distributed.distributed_data_parallel_config import ShardedOptimizerFlags
from megatron.core.model_parallel_config import HalfPrecision
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
from megatron.core.optimizer.optimizer import MegatronOptimizer
from megatron.core.optimizer.optimizer_config import OptimizerFlags
from megatron.core.optimizer.param_groups import parse_rule
from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.settings.flags import fields_of
from megatron.training.config.resolved import ResolvedRun


def optimizer_config(run: ResolvedRun) -> OptimizerConfig:
    """Return the optimizer's settings."""
    return OptimizerConfig(
        **fields_of(OptimizerFlags, run.optimizer),
        **fields_of(HalfPrecision, run.precision),
        **fields_of(ShardedOptimizerFlags, run.ddp),
        in_whole_vectors=run.parallelism.layout_invariant_mode,
        on_nonfinite_grad="raise" if run.schedule.check_for_nan_in_loss_and_grad else "skip",
    )


def build_optimizer(
    run: ResolvedRun, model: Sequence[nn.Module], groups: ProcessGroupCollection
) -> Any:
    """Return the optimizer of this rank's chunks."""
    return get_megatron_optimizer(
        optimizer_config(run),
        list(model),
        dict(parse_rule(text) for text in run.optimizer.param_rules),
        pg_collection=groups,
    )


def build_scheduler(run: ResolvedRun, optimizer: MegatronOptimizer) -> OptimizerParamScheduler:
    """Return the schedules; their lengths are in samples (see `resolve_lengths`)."""
    rates, schedule = run.optimizer, run.schedule
    return OptimizerParamScheduler(
        optimizer,
        init_lr=schedule.lr_warmup_init,
        max_lr=rates.lr or 0.0,
        min_lr=rates.min_lr or 0.0,
        lr_warmup_steps=schedule.lr_warmup_steps,
        lr_decay_steps=schedule.lr_decay_steps,
        lr_decay_style=schedule.lr_decay_style,
        start_wd=rates.start_weight_decay,
        end_wd=rates.end_weight_decay,
        wd_incr_steps=schedule.wd_incr_steps,
        wd_incr_style=rates.weight_decay_incr_style,
        use_checkpoint_opt_param_scheduler=schedule.use_checkpoint_opt_param_scheduler,
        override_opt_param_scheduler=schedule.override_opt_param_scheduler,
        wsd_decay_steps=schedule.wsd_decay_steps,
        lr_wsd_decay_style=schedule.lr_wsd_decay_style,
        samples_per_iteration=None if schedule.is_sample_based else schedule.global_batch_size,
    )
