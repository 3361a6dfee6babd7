"""What may happen around steps. A hook has its own small state and knows nothing of the others."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from megatron.training.run.state import StopReason, TakenStep, TrainState


class Hook:
    """Base of all hooks; every method does nothing.

    Methods are called on all ranks at the same point, so a hook may use collectives. Those that
    return a state may only change its counters (an evaluation consumes validation samples).
    """

    def before_training(self, state: TrainState) -> TrainState:
        """Called once before the first step."""
        return state

    def should_stop(self, state: TrainState) -> StopReason | None:
        """Called before each step; all ranks must give the same answer."""
        return None

    def before_step(self, state: TrainState) -> None:
        """Called before each step."""

    def after_step(self, state: TrainState, result: TakenStep) -> TrainState:
        """Called after each step; `state` counts it already."""
        return state

    def after_roll_back(self, state: TrainState) -> None:
        """Called instead of `after_step` where the run has returned to the earlier `state`."""

    def after_training(self, state: TrainState, stop: StopReason) -> TrainState:
        """Called once after the last step."""
        return state

    def close(self) -> None:
        """Release files and handlers; called also when training failed."""


class Hooks:
    """Several hooks as one, called in their order."""

    def __init__(self, hooks: Iterable[Hook]) -> None:
        self._hooks = list(hooks)

    def __iter__(self) -> Iterator[Hook]:
        return iter(self._hooks)

    def before_training(self, state: TrainState) -> TrainState:
        """Call every hook."""
        for hook in self._hooks:
            state = hook.before_training(state)
        return state

    def should_stop(self, state: TrainState) -> StopReason | None:
        """Return the first reason that any hook has. All are asked, as some of them meet."""
        reasons = [hook.should_stop(state) for hook in self._hooks]
        return next((reason for reason in reasons if reason is not None), None)

    def before_step(self, state: TrainState) -> None:
        """Call every hook."""
        for hook in self._hooks:
            hook.before_step(state)

    def after_step(self, state: TrainState, result: TakenStep) -> TrainState:
        """Call every hook."""
        for hook in self._hooks:
            state = hook.after_step(state, result)
        return state

    def after_roll_back(self, state: TrainState) -> None:
        """Call every hook."""
        for hook in self._hooks:
            hook.after_roll_back(state)

    def after_training(self, state: TrainState, stop: StopReason) -> TrainState:
        """Call every hook."""
        for hook in self._hooks:
            state = hook.after_training(state, stop)
        return state

    def close(self) -> None:
        """Close every hook, last one first."""
        for hook in reversed(self._hooks):
            hook.close()
