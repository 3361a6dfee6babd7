"""Hooks: actions around training steps. Each hook has its own state, independent of the others."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from megatron.training.run.state import StopReason, TakenStep, TrainState


class Hook:
    """Base of all hooks; every method does nothing.

    All ranks call a method at the same point, so a hook may use collectives. A method that returns
    a state may only change its counters (an evaluation consumes validation samples).
    """

    def before_training(self, state: TrainState) -> TrainState:
        """Called once before the first step."""
        return state

    def should_stop(self, state: TrainState) -> StopReason | None:
        """Called before each step; all ranks must return the same value."""
        return None

    def before_step(self, state: TrainState) -> None:
        """Called before each step."""

    def after_step(self, state: TrainState, result: TakenStep) -> TrainState:
        """Called after each step; the counters of `state` include it."""
        return state

    def after_roll_back(self, state: TrainState) -> None:
        """Called instead of `after_step` if the run has rolled back to the earlier `state`."""

    def after_training(self, state: TrainState, stop: StopReason) -> TrainState:
        """Called once after the last step."""
        return state

    def close(self) -> None:
        """Release files and handlers; also called after training has failed."""


class Hooks:
    """A list of hooks with the methods of one hook; each method calls all hooks in order."""

    def __init__(self, hooks: Iterable[Hook]) -> None:
        self._hooks = list(hooks)

    def __iter__(self) -> Iterator[Hook]:
        return iter(self._hooks)

    def before_training(self, state: TrainState) -> TrainState:
        for hook in self._hooks:
            state = hook.before_training(state)
        return state

    def should_stop(self, state: TrainState) -> StopReason | None:
        """Call all hooks, because some use collectives, and return the first reason to stop."""
        reasons = [hook.should_stop(state) for hook in self._hooks]
        return next((reason for reason in reasons if reason is not None), None)

    def before_step(self, state: TrainState) -> None:
        for hook in self._hooks:
            hook.before_step(state)

    def after_step(self, state: TrainState, result: TakenStep) -> TrainState:
        for hook in self._hooks:
            state = hook.after_step(state, result)
        return state

    def after_roll_back(self, state: TrainState) -> None:
        for hook in self._hooks:
            hook.after_roll_back(state)

    def after_training(self, state: TrainState, stop: StopReason) -> TrainState:
        for hook in self._hooks:
            state = hook.after_training(state, stop)
        return state

    def close(self) -> None:
        """Close every hook, last one first."""
        for hook in reversed(self._hooks):
            hook.close()
