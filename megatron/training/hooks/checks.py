"""Checks during training: are replicas equal, does a loss spike?"""

from __future__ import annotations

import math
import statistics
from collections import deque
from collections.abc import Callable, Iterable

from megatron.core.foundation.errors import SpikeError
from megatron.core.optimizer.replica_check import ReplicaCheck
from megatron.core.optimizer.update import NormCheck
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


class RecentValues:
    """The last values of one figure, and how far another is above them.

    The yardstick is the median of the last steps and their median absolute deviation, which one
    earlier spike does not move. The first losses of a run fall fast and are few: while there are
    fewer than a fifth of the window, only what is much farther away is a spike.
    """

    def __init__(self, window: int, limit: float) -> None:
        self.window, self.limit = window, limit
        self.values: deque[float] = deque(maxlen=window)

    def spike(self, value: float) -> str:
        """Say how far a value is above the others if that is far; "" otherwise."""
        if len(self.values) < 3 or not math.isfinite(value):
            return ""
        scarcity = max(1.0, self.window / 5 / len(self.values))
        median = statistics.median(self.values)
        spread = statistics.median(abs(v - median) for v in self.values)
        distance = (value - median) / max(1.4826 * spread, 0.01 * abs(median), 1e-8)
        if distance <= self.limit * scarcity**2:
            return ""
        return (
            f"{value:.6E} is {distance:.1f} deviations above the median {median:.6E} of the last"
            f" {len(self.values)} steps"
        )

    def add(self, value: float) -> None:
        """Remember a value, if it is finite."""
        if math.isfinite(value):
            self.values.append(value)


class WatchForSpikes(Hook):
    """Warns when a loss is far above the recent ones."""

    def __init__(
        self, warn: Callable[[str], None], *, window: int = 50, limit: float = 10.0
    ) -> None:
        self.warn = warn
        self.limit = limit
        self.window = window
        self._recent: dict[str, RecentValues] = {}

    def after_step(self, state: TrainState, result: StepResult) -> TrainState:
        """Compare every loss with its own past."""
        result = result.read()
        for name, value in result.losses.items():
            recent = self._recent.setdefault(name, RecentValues(self.window, self.limit))
            if found := recent.spike(value):
                last = state.consumed_train_samples
                self.warn(
                    f" WARNING: iteration {state.iteration}: {name} {found}; grad norm"
                    f" {result.grad_norm}, samples {last - result.num_samples} to {last - 1}."
                )
            recent.add(value)
        return state


class GuardGradientNorm(Hook):
    """Answers a gradient norm that is far above the recent ones, before the update.

    All ranks know the same norm, and decide the same. A norm that was refused does not count as a
    recent one.

    Args:
        norm_checks: of the optimizer.
        policy: "warn", "skip" the step, or "stop" the run.
        warn: prints a line on the rank that logs.
    """

    def __init__(
        self,
        norm_checks: list[NormCheck],
        policy: str,
        warn: Callable[[str], None],
        *,
        window: int = 50,
        limit: float = 10.0,
    ) -> None:
        self.norm_checks, self.policy, self.warn = norm_checks, policy, warn
        self._recent = RecentValues(window, limit)
        self._iteration = 0

    def before_training(self, state: TrainState) -> TrainState:
        """Let the optimizer ask before every update."""
        self.norm_checks.append(self.judge)
        return state

    def before_step(self, state: TrainState) -> None:
        """Learn which step it is."""
        self._iteration = state.iteration + 1

    def judge(self, norm: float) -> str | None:
        """Return why an update is refused; None: take it.

        Raises:
            SpikeError: on all ranks, with the policy "stop".
        """
        found = self._recent.spike(norm)
        if found and self.policy == "skip":
            return f"gradient norm {found}"
        if found and self.policy == "stop":
            raise SpikeError(
                f"iteration {self._iteration}: gradient norm {found}.",
                rule="with --on-spike stop such a gradient does not reach the weights",
                flags=["--check-for-large-grads", "--on-spike"],
                fix="no weight was changed by this step: look at its samples, lower --lr, or use"
                " --on-spike skip",
            )
        if found:
            self.warn(f" WARNING: iteration {self._iteration}: gradient norm {found}.")
        self._recent.add(norm)
        return None
