"""Keep the outside views of the run current: the failure report and Megatron's `args`."""

from __future__ import annotations

from megatron.training import global_vars
from megatron.training.hooks.base import Hook
from megatron.training.resilience.status import RunStatus
from megatron.training.state import StepResult, TrainState


class PublishCounters(Hook):
    """Writes the counters where others look for them. Nothing in the loop reads them there."""

    def __init__(self, status: RunStatus) -> None:
        self.status = status

    def before_training(self, state: TrainState) -> TrainState:
        """Publish the counters of a resumed run."""
        self.status.activity = "training"
        self._publish(state)
        return state

    def before_step(self, state: TrainState) -> None:
        """Name the step that runs now."""
        self.status.iteration = state.iteration + 1
        global_vars.get_args().curr_iteration = state.iteration

    def after_step(self, state: TrainState, result: StepResult) -> TrainState:
        """Publish the counters."""
        self._publish(state)
        return state

    def _publish(self, state: TrainState) -> None:
        args = global_vars.get_args()
        self.status.iteration = args.iteration = state.iteration
        args.consumed_train_samples = state.consumed_train_samples
        args.consumed_valid_samples = state.consumed_valid_samples
        args.skipped_train_samples = state.skipped_train_samples
        args.num_floating_point_operations_so_far = state.flops_so_far
