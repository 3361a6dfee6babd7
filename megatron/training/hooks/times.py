"""Shares of time of all ranks, measured in every step and averaged at each log line."""

from __future__ import annotations

from megatron.core.foundation.flight_recorder import PROGRESS
from megatron.core.transport import torch_collectives
from megatron.core.transport.object_collectives import sum_across_ranks
from megatron.training.hooks.base import Hook
from megatron.training.metrics.time_account import (
    IntervalTimes,
    StepClock,
    StepTimes,
    shares_of,
)
from megatron.training.run.context import TrainingContext
from megatron.training.run.state import StopReason, TakenStep, TrainState


class MeasureTimes(Hook):
    """Measures the shares of compute, communication, bubble, data, checkpoints and evaluations in
    the time since the last log line, as means over all ranks.

    Communication:
        an all-reduce of a few numbers over all processes at every log line.
    """

    def __init__(self, context: TrainingContext) -> None:
        self.interval = context.run.logging.log_interval
        self.shares: dict[str, float] = {}
        """Part -> share in the last interval. Empty before the first interval ends; every interval
        makes a new dict."""
        self.last: StepTimes | None = None
        """Times of this rank's last step."""
        self._clock = StepClock(PROGRESS.waits, context.groups.ranks.get("pp", ()))
        self._sums = IntervalTimes(PROGRESS.waits)

    def before_training(self, state: TrainState) -> TrainState:
        """Begin the first interval."""
        self._sums = IntervalTimes(PROGRESS.waits)
        return state

    def before_step(self, state: TrainState) -> None:
        """Begin a step."""
        self._clock.start()

    def after_step(self, state: TrainState, result: TakenStep) -> TrainState:
        """End the step, and the interval if a log line follows."""
        self.last = self._clock.stop()
        self._sums.add(self.last)
        if state.iteration % self.interval == 0:
            self._end_interval()
        return state

    def after_roll_back(self, state: TrainState) -> None:
        """End the step that was rolled back; the rollback itself counts as other time."""
        self._sums.add(self._clock.stop())

    def after_training(self, state: TrainState, stop: StopReason) -> TrainState:
        """End the interval of a run that is too short for a log line."""
        if not self.shares:
            self._end_interval()
        return state

    def _end_interval(self) -> None:
        self.shares = shares_of(sum_across_ranks(self._sums.seconds(), torch_collectives.world()))
        self._sums = IntervalTimes(PROGRESS.waits)
