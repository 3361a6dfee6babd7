"""Checks during training: are replicas equal, does a loss or a gradient norm spike?"""

from __future__ import annotations

import dataclasses
import math
import statistics
from collections import deque
from collections.abc import Callable, Iterable, Mapping

from megatron.core.foundation.errors import SpikeError
from megatron.core.optimizer.replica_check import ReplicaCheck
from megatron.core.optimizer.update import NormCheck
from megatron.core.transport import torch_collectives
from megatron.core.transport.object_collectives import broadcast_object, largest_across_ranks
from megatron.training.hooks.base import Hook
from megatron.training.run.state import RollBack, StepResult, StopReason, TrainState


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


_NORM = "gradient norm"


class RecentValues:
    """The last values of one figure, and how far another is above them.

    The yardstick is the median of the last steps and their median absolute deviation, which one
    earlier spike does not move. The first losses of a run fall fast and are few: while there are
    fewer than a fifth of the window, only what is much farther away is a spike.
    """

    def __init__(self, window: int, limit: float, values: Iterable[float] = ()) -> None:
        self.window, self.limit = window, limit
        self.values: deque[float] = deque(values, maxlen=window)

    def spike(self, value: float) -> str:
        """Say how far a value is above the others if that is far; "" otherwise."""
        if len(self.values) < 3 or not math.isfinite(value):
            return ""
        scarcity = max(1.0, self.window / 5 / len(self.values))
        median = statistics.median(self.values)
        spread = statistics.median(abs(v - median) for v in self.values)
        deviation = max(1.4826 * spread, 0.01 * abs(median), 1e-8)
        distance = (value - median) / deviation
        most = self.limit * scarcity**2
        if distance <= most:
            return ""
        return (
            f"{value:.6E} is {distance:.1f} deviations above the median {median:.6E} of the last"
            f" {len(self.values)} steps (threshold {median + most * deviation:.6E})"
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


class GuardAgainstSpikes(Hook):
    """Answers a loss or a gradient norm that is far above the recent ones, before the update.

    All ranks know the same figures, and decide the same. What was refused does not count as
    recent. The recent figures are part of the state of the run, so that a resumed run decides as
    one that was not stopped. It comes before all hooks that count or keep a step.

    Args:
        policy: "warn" (of norms), "skip" the step, "rollback" to an earlier state, or "stop".
        warn: prints a line on the rank that logs.
        norm_checks: of the optimizer; None if norms are not judged.
    """

    def __init__(
        self,
        policy: str,
        warn: Callable[[str], None],
        norm_checks: list[NormCheck] | None,
        *,
        window: int = 50,
        limit: float = 10.0,
    ) -> None:
        self.norm_checks, self.policy, self.warn = norm_checks, policy, warn
        self.window, self.limit = window, limit
        self._recent: dict[str, RecentValues] = {}
        self._of_step: dict[str, float] = {}
        self._names: tuple[str, ...] | None = None
        self._iteration = 0
        self._spike = ""

    def before_training(self, state: TrainState) -> TrainState:
        """Let the optimizer ask before every update."""
        if self.norm_checks is not None:
            self.norm_checks.append(self.judge_norm)
        self.after_roll_back(state)
        return state

    def before_step(self, state: TrainState) -> None:
        """Learn which step it is."""
        self._iteration = state.iteration + 1
        self._of_step, self._spike = {}, ""

    def share_losses(self, losses: Mapping[str, float], is_bad: bool) -> tuple[list[float], bool]:
        """Give all ranks the losses of the last stage, and whether any rank has a bad one.

        Args:
            losses: means over the global batch on the last stage; {} elsewhere.
            is_bad: a loss of this rank is not finite.
        Returns:
            the losses in the order of their names, and the answer of all ranks.
        Communication:
            one all-reduce of these numbers over all processes; at the first step of a run a
            broadcast of the names.
        """
        world = torch_collectives.world()
        if self._names is None:
            self._names = broadcast_object(tuple(losses), world.size() - 1, world)
        mine = [losses.get(name, -math.inf) for name in self._names]
        known = [value if math.isfinite(value) else -math.inf for value in mine]
        *values, bad = largest_across_ranks([*known, float(is_bad)], world)
        return values, bool(bad)

    def judge_losses(self, values: list[float]) -> str | None:
        """Return why a step is refused, given what `share_losses` returned; None: take it."""
        judged = [self._judge(name, v) for name, v in zip(self._names or (), values, strict=True)]
        return next((reason for reason in judged if reason is not None), None)

    def judge_norm(self, norm: float) -> str | None:
        """Return why an update is refused; None: take it."""
        return self._judge(_NORM, norm)

    def _judge(self, name: str, value: float) -> str | None:
        """Compare a figure with its own past.

        Raises:
            SpikeError: on all ranks, with the policy "stop".
        """
        recent = self._recent.setdefault(name, RecentValues(self.window, self.limit))
        found = recent.spike(value)
        if found and self.policy == "stop":
            raise SpikeError(
                f"iteration {self._iteration}: {name} {found}.",
                rule="with --on-spike stop such a step does not reach the weights",
                flags=["--check-for-spiky-loss", "--check-for-large-grads", "--on-spike"],
                fix="no weight was changed by this step: look at its samples, lower --lr, or use"
                " --on-spike skip or rollback",
            )
        if found and self.policy == "warn":
            self.warn(f" WARNING: iteration {self._iteration}: {name} {found}.")
        elif found:
            self._spike = f"{name} {found}"
            return self._spike
        self._of_step[name] = value
        return None

    def after_step(self, state: TrainState, result: StepResult) -> TrainState:
        """Remember the figures of the step, or leave it.

        Raises:
            RollBack: on all ranks, with the policy "rollback".
        """
        if self._spike and self.policy == "rollback":
            raise RollBack(self._spike)
        for name, value in self._of_step.items():
            self._recent[name].add(value)
        values = {name: tuple(recent.values) for name, recent in self._recent.items()}
        return dataclasses.replace(state, recent_values=values)

    def after_roll_back(self, state: TrainState) -> None:
        """Take the recent figures from the state of the run."""
        self._recent = {
            name: RecentValues(self.window, self.limit, values)
            for name, values in state.recent_values.items()
        }
