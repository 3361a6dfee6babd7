"""Megatron's functions for the parts of `pretrain`, for scripts with their own loop.

They read their settings from `global_vars`, which `initialize_megatron` sets.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from torch import nn

from megatron.core.enums import ModelType
from megatron.core.optimizer.optimizer import MegatronOptimizer
from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.training import global_vars
from megatron.training.arguments import run_as_in
from megatron.training.checkpointing import load_checkpoint
from megatron.training.datasets.iterators import build_data, sample_counts
from megatron.training.run.context import TrainingContext
from megatron.training.run.state import TrainState
from megatron.training.run.step import train_step as step
from megatron.training.setup.model import build_model, install_callbacks, refuse_other_models
from megatron.training.setup.optimizer import build_optimizer, build_scheduler


def setup_model_and_optimizer(
    model_provider_func: Callable[..., nn.Module],
    model_type: ModelType = ModelType.encoder_or_decoder,
    checkpointing_context: Mapping[str, object] | None = None,
) -> tuple[list[nn.Module], Any, Any]:
    """Return (model chunks, optimizer, parameter scheduler), loaded from --load if it is given."""
    refuse_other_models("setup_model_and_optimizer", model_type)
    args, groups = global_vars.get_args(), ProcessGroupCollection.current()
    run = run_as_in(args)
    model = build_model(run, model_provider_func, groups)
    optimizer = build_optimizer(run, model, groups)
    scheduler = build_scheduler(run, optimizer)
    install_callbacks(run, model, optimizer, groups, global_vars.get_timers())
    args.iteration, args.num_floating_point_operations_so_far = 0, 0.0
    if run.checkpoint.load is not None or run.checkpoint.pretrained_checkpoint is not None:
        args.iteration, args.num_floating_point_operations_so_far = load_checkpoint(
            model, optimizer, scheduler
        )
    return model, optimizer, scheduler


def train_step(
    forward_step_func: Callable[..., object],
    data_iterator: object,
    model: list[nn.Module],
    optimizer: MegatronOptimizer,
    opt_param_scheduler: OptimizerParamScheduler,
    config: TransformerConfig,
    forward_backward_func: Callable[..., object],
    iteration: int | None = None,
) -> tuple[dict[str, float], int, bool, bool, int, float | None, float | None]:
    """Train on one global batch.

    Returns:
        (losses on the last stage, 1 if skipped else 0, should checkpoint, should exit, exit code,
        grad norm, zeros in the gradient). The three values in the middle are always False, False
        and 0: a step that is not finite raises NumericsError.
    """
    args = global_vars.get_args()
    run = run_as_in(args)
    context = TrainingContext(
        run=run,
        groups=ProcessGroupCollection.current(),
        model=model,
        config=config,
        optimizer=optimizer,
        scheduler=opt_param_scheduler,
        forward_step=forward_step_func,
        forward_backward=forward_backward_func,
        timers=global_vars.get_timers(),
    )
    context.data.train = data_iterator
    state = TrainState(
        iteration=args.iteration if iteration is None else iteration,
        consumed_train_samples=args.consumed_train_samples,
    )
    result = step(context, state, context.current_plan()).read()
    return (
        dict(result.losses),
        int(result.was_skipped),
        False,
        False,
        0,
        result.grad_norm,
        result.num_zeros,
    )


def get_train_valid_test_num_samples() -> list[int | None]:
    """Return the number of samples that the run needs from each split."""
    return list(sample_counts(run_as_in(global_vars.get_args())))


def build_train_valid_test_data_iterators(
    build_train_valid_test_datasets_provider: Callable[..., object],
) -> tuple[Any, Any, Any]:
    """Return this rank's iterators (train, valid, test); valid is a list for several sets."""
    args = global_vars.get_args()
    state = TrainState(
        consumed_train_samples=args.consumed_train_samples,
        consumed_valid_samples=args.consumed_valid_samples,
    )
    data = build_data(
        run_as_in(args),
        build_train_valid_test_datasets_provider,
        ProcessGroupCollection.current(),
        state,
    )
    valid = [each.data for each in data.valid]
    return data.train, valid[0] if len(valid) == 1 else valid, data.test
