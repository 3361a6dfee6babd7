"""Checks during training: are replicas equal, does a loss spike?"""

from __future__ import annotations

import math
import statistics
from collections import deque
from collections.abc import Callable, Iterable

from megatron.core.optimizer.replica_check import ReplicaCheck
from megatron.training.hooks.base import Hook
from megatron.training.run.state import StepResult, StopReason, TrainState


class CompareReplicas(Hook):
    """Stops the run when ranks that hold copies of the same tensors hold other bits.

    Args:
        interval: steps between comparisons.
        save_intervals: steps between checkpoints of any kind, which a comparison precedes.
    """

    def __init__(
        self, check: ReplicaCheck, interval: int, save_intervals: Iterable[int | None]
    ) -> None:
        self.check = check
        self.intervals = [interval, *(every for every in save_intervals if every)]
        self._last_compared = -1
        self._iteration = 0

    def before_training(self, state: TrainState) -> TrainState:
        """Let every update be preceded by what must be noted before it."""
        self.check.optimizer.norm_checks.append(self._before_update)
        return state

    def before_step(self, state: TrainState) -> None:
        """Learn which step it is."""
        self._iteration = state.iteration + 1

    def _before_update(self, norm: float) -> None:
        self.check.before_update(norm, self._iteration)

    def after_step(self, state: TrainState, result: StepResult) -> TrainState:
        """Compare when it is time."""
        if any(state.iteration % every == 0 for every in self.intervals):
            self._compare(state.iteration)
        return state

    def after_training(self, state: TrainState, stop: StopReason) -> TrainState:
        """Compare what will be saved as the end of the run."""
        if state.iteration != self._last_compared:
            self._compare(state.iteration)
        return state

    def _compare(self, iteration: int) -> None:
        self.check.compare(iteration)
        self._last_compared = iteration


class WatchForSpikes(Hook):
    """Warns when a loss is far above the recent ones.

    The yardstick is the median of the last steps and their median absolute deviation, which one
    earlier spike does not move. The first losses of a run fall fast and are few: while there are
    fewer than a fifth of the window, only what is much farther away is a spike.
    """

    def __init__(
        self, warn: Callable[[str], None], *, window: int = 50, limit: float = 10.0
    ) -> None:
        self.warn = warn
        self.limit = limit
        self.window = window
        self._recent: dict[str, deque[float]] = {}

    def after_step(self, state: TrainState, result: StepResult) -> TrainState:
        """Compare every loss with its own past."""
        for name, value in result.losses.items():
            recent = self._recent.setdefault(name, deque(maxlen=self.window))
            if len(recent) >= 3 and math.isfinite(value):
                scarcity = max(1.0, self.window / 5 / len(recent))
                median = statistics.median(recent)
                spread = statistics.median(abs(v - median) for v in recent)
                distance = (value - median) / max(1.4826 * spread, 0.01 * abs(median), 1e-8)
                if distance > self.limit * scarcity**2:
                    last = state.consumed_train_samples
                    self.warn(
                        f" WARNING: iteration {state.iteration}: {name} {value:.6E} is"
                        f" {distance:.1f} deviations above the median {median:.6E} of the last"
                        f" {len(recent)} steps; grad norm {result.grad_norm}, samples"
                        f" {last - result.num_samples} to {last - 1}."
                    )
            if math.isfinite(value):
                recent.append(value)
        return state
