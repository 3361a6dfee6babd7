"""Build model, optimizer and checkpointer of a session, and load its initial state."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from torch import nn

from megatron.core.pipeline_parallel.schedules import get_forward_backward_func
from megatron.core.settings.flags import flag_specs
from megatron.resilience.status import RunStatus
from megatron.training.checkpointing import CheckpointContext, Checkpointer
from megatron.training.config.optimizer import OptimizerSettings
from megatron.training.config.resolved import ResolvedRun
from megatron.training.config.run import all_flags
from megatron.training.launch.printing import print_rank_0
from megatron.training.run.context import TrainingContext
from megatron.training.run.state import TrainState
from megatron.training.setup.initialize import Session
from megatron.training.setup.model import build_model, install_callbacks
from megatron.training.setup.optimizer import build_optimizer, build_scheduler


def assemble(
    session: Session, model_provider: Callable[..., nn.Module], forward_step: Callable[..., Any]
) -> tuple[TrainingContext, Checkpointer]:
    """Build model, optimizer and schedule. Data are built later, as they depend on a checkpoint."""
    run, groups = session.run, session.groups
    model = build_model(run, model_provider, groups)
    optimizer = scheduler = None
    if not run.schedule.skip_train:
        optimizer = build_optimizer(run, model, groups)
        scheduler = build_scheduler(run, optimizer)
    config = install_callbacks(run, model, optimizer, groups, session.timers)
    context = TrainingContext(
        run=run,
        groups=groups,
        model=model,
        config=config,
        optimizer=optimizer,
        scheduler=scheduler,
        forward_step=forward_step,
        forward_backward=get_forward_backward_func(),
        timers=session.timers,
    )
    saved = CheckpointContext(
        model=model,
        optimizer=optimizer,
        scheduler=scheduler,
        groups=groups,
        weights="all" if run.lora.lora_rank is None else "adapters",
        args={**run.values, **run.extra},
    )
    attempt = session.attempt
    memory = None if attempt is None else (attempt.copies, attempt.assignment.node)
    return context, Checkpointer(run.checkpoint, saved, memory=memory)


def load_state(run: ResolvedRun, checkpointer: Checkpointer, status: RunStatus) -> TrainState:
    """Load the initial checkpoint or model, and return the counters of the run."""
    if (
        run.checkpoint.load is None
        and run.checkpoint.pretrained_checkpoint is None
        and run.checkpoint.load_hf is None
        and checkpointer.memory is None
    ):
        return TrainState()
    restored = checkpointer.load()
    if restored is None:
        return TrainState()
    for line in changed_settings(run, restored.args):
        print_rank_0(f" > {line}")
    status.iteration = restored.train_state.iteration
    status.last_good_checkpoint = restored.train_state.iteration or None
    return restored.train_state


_MAY_CHANGE = (
    "lr", "min_lr", "decoupled_lr", "decoupled_min_lr", "loss_scale", "initial_loss_scale",
    "min_loss_scale", "loss_scale_window", "hysteresis", "on_loss_scale_floor",
    "log_num_zeros_in_grad",
)  # fmt: skip
"""Flags of the optimizer that the schedules set, or that only affect reports."""


def changed_settings(run: ResolvedRun, stored: Mapping[str, object]) -> list[str]:
    """Return one line for each setting of optimizer or dropout that differs from the checkpoint's.

    Args:
        stored: the settings of the run that saved the checkpoint.
    """
    dropouts = [all_flags()["attention_dropout"], all_flags()["hidden_dropout"]]
    continues = not (run.checkpoint.finetune or run.checkpoint.no_load_optim)
    lines = [
        f"{spec.flag} {run.values[spec.name]} is used; the checkpoint was trained with"
        f" {stored[spec.name]}"
        for spec in (*flag_specs(OptimizerSettings, "optimizer"), *dropouts)
        if continues
        and spec.name in stored
        and stored[spec.name] != run.values[spec.name]
        and spec.name not in _MAY_CHANGE
    ]
    seed = stored.get("seed", run.schedule.seed)
    if seed != run.schedule.seed and not (run.checkpoint.finetune or run.checkpoint.no_load_rng):
        lines.append(
            f"random numbers continue with the checkpoint's --seed {seed}; --no-load-rng uses"
            f" --seed {run.schedule.seed}"
        )
    return lines
