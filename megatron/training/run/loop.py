"""The training loop. It contains no communication: ranks communicate in steps and in hooks."""

from __future__ import annotations

from megatron.training.hooks.base import Hooks
from megatron.training.run.context import TrainingContext, TrainStep
from megatron.training.run.state import RollbackNeeded, StopReason, TrainState
from megatron.training.run.step import train_step


def train(
    context: TrainingContext, state: TrainState, hooks: Hooks, step: TrainStep = train_step
) -> tuple[TrainState, StopReason]:
    """Run steps until a hook returns a reason to stop; one hook checks the number of steps.

    Args:
        state: counters of a new or resumed run.
        hooks: called around steps: logs, evaluation, checkpoints, stop conditions.
        step: `train_step` or a wrapper around it.
    """
    state = hooks.before_training(state)
    while (stop := hooks.should_stop(state)) is None:
        plan = context.plan_step(state.consumed_train_samples)
        hooks.before_step(state)
        result = step(context, state, plan)
        try:
            state = hooks.after_step(state.advanced(result), result)
        except RollbackNeeded as spike:
            state = context.roll_back(state, spike)
            hooks.after_roll_back(state)
    return hooks.after_training(state, stop), stop
