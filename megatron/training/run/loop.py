"""The training loop. There is no parallelism here: ranks meet inside a step, and in hooks."""

from __future__ import annotations

from megatron.training.hooks.base import Hooks
from megatron.training.run.context import TrainingContext
from megatron.training.run.state import RollBack, StopReason, TrainState
from megatron.training.run.step import train_step


def train(
    context: TrainingContext, state: TrainState, hooks: Hooks
) -> tuple[TrainState, StopReason]:
    """Run steps until a hook says stop, the step budget being one of them.

    Args:
        context: model, optimizer, data: what a step works with.
        state: where the run stands; a resumed run begins in the middle.
        hooks: what happens around steps: logs, evaluation, checkpoints, the end.
    """
    state = hooks.before_training(state)
    while (stop := hooks.should_stop(state)) is None:
        plan = context.plan_step(state.consumed_train_samples)
        hooks.before_step(state)
        result = train_step(context, state, plan)
        try:
            state = hooks.after_step(state.advanced(result), result)
        except RollBack as spike:
            state = context.roll_back(state, spike)
            hooks.after_roll_back(state)
    return hooks.after_training(state, stop), stop
