"""Stop conditions: number of steps, interval, phase of the data, duration, signal."""

from __future__ import annotations

import time
from collections.abc import Collection

from megatron.core.transport import torch_collectives
from megatron.core.transport.object_collectives import any_across_ranks
from megatron.resilience.signals import SignalFlag
from megatron.training.hooks.base import Hook
from megatron.training.run.state import StopReason, TakenStep, TrainState


class StepBudget(Hook):
    """Stops after the last step."""

    def __init__(self, train_iters: int) -> None:
        self.train_iters = train_iters

    def should_stop(self, state: TrainState) -> StopReason | None:
        """Return FINISHED at the last step, also if a run resumes there."""
        return StopReason.FINISHED if state.iteration >= self.train_iters else None


class ExitInterval(Hook):
    """Stops after a step that is a multiple of the interval, but not before a first step."""

    def __init__(self, interval: int) -> None:
        self.interval = interval
        self._has_stepped = False

    def after_step(self, state: TrainState, result: TakenStep) -> TrainState:
        """Remember that this run did something."""
        self._has_stepped = True
        return state

    def after_roll_back(self, state: TrainState) -> None:
        """Begin anew, as after a resume."""
        self._has_stepped = False

    def should_stop(self, state: TrainState) -> StopReason | None:
        """Return EXIT_INTERVAL at a multiple of the interval."""
        is_multiple = state.iteration % self.interval == 0
        return StopReason.EXIT_INTERVAL if self._has_stepped and is_multiple else None


class PhaseEnd(Hook):
    """Stops at the end of a phase of the data, but not before the first step of the next phase."""

    def __init__(self, transitions: Collection[int]) -> None:
        self._transitions = frozenset(transitions)
        self._has_stepped = False

    def after_step(self, state: TrainState, result: TakenStep) -> TrainState:
        """Remember that this run did something."""
        self._has_stepped = True
        return state

    def after_roll_back(self, state: TrainState) -> None:
        """Begin anew, as after a resume."""
        self._has_stepped = False

    def should_stop(self, state: TrainState) -> StopReason | None:
        """Return PHASE_END after the last step of a phase."""
        is_end = self._has_stepped and state.iteration in self._transitions
        return StopReason.PHASE_END if is_end else None


class ExitDuration(Hook):
    """Stops after a duration. All ranks stop once the time has passed on any rank."""

    def __init__(self, minutes: float) -> None:
        # Monotonic, because setting the wall clock must not end a run.
        self._deadline = time.monotonic() + 60.0 * minutes

    def should_stop(self, state: TrainState) -> StopReason | None:
        """Return EXIT_DURATION on all ranks once the time has passed on any rank."""
        return (
            StopReason.EXIT_DURATION
            if any_across_ranks(time.monotonic() > self._deadline, torch_collectives.world())
            else None
        )


class ExitOnSignal(Hook):
    """Stops after the current step if any rank has received the signal."""

    def __init__(self, flag: SignalFlag) -> None:
        self._flag = flag

    def should_stop(self, state: TrainState) -> StopReason | None:
        """Return EXIT_SIGNAL on all ranks once any rank has received the signal."""
        return (
            StopReason.EXIT_SIGNAL
            if any_across_ranks(self._flag.is_set, torch_collectives.world())
            else None
        )

    def close(self) -> None:
        """Restore the previous signal handlers."""
        self._flag.restore()
