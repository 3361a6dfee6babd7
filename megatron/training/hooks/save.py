"""Checkpoints during the run and at its end."""

from __future__ import annotations

import time
from collections.abc import Callable

from megatron.training.checkpointing import Checkpointer
from megatron.training.hooks.base import Hook
from megatron.training.resilience.progress import RunProgress
from megatron.training.state import StepResult, StopReason, TrainState


class SaveCheckpoints(Hook):
    """Saves every `interval` steps, and whatever the last save does not hold when the loop ends.

    An asynchronous save is committed at the step after its bytes are written; the end of the run
    waits for it.
    """

    def __init__(
        self,
        checkpointer: Checkpointer,
        interval: int | None,
        progress: RunProgress,
        write: Callable[[str], None],
    ) -> None:
        self.checkpointer = checkpointer
        self.interval = interval
        self.progress = progress
        self.write = write
        self._last_saved: int | None = None

    def before_training(self, state: TrainState) -> TrainState:
        """Claim the directory, so that a second run in it ends at once."""
        self.checkpointer.claim()
        self._last_saved = state.iteration
        return state

    def after_step(self, state: TrainState, result: StepResult) -> TrainState:
        """Commit what the background has written, and save when it is time."""
        self.checkpointer.after_step()
        if self.interval is not None and state.iteration % self.interval == 0:
            self._save(state)
        return state

    def after_training(self, state: TrainState, stop: StopReason) -> TrainState:
        """Save the end of the run, for whatever reason it ended."""
        if state.iteration != self._last_saved:
            self._save(state)
        self.checkpointer.finish()
        return state

    def _save(self, state: TrainState) -> None:
        with self.progress.at("saving a checkpoint"):
            started_at = time.perf_counter()
            self.checkpointer.save(state)
            self._last_saved = self.progress.last_good_checkpoint = state.iteration
            self.write(
                f" saved iteration {state.iteration} in {time.perf_counter() - started_at:.2f} s"
            )

    def close(self) -> None:
        """Give the directory free."""
        self.checkpointer.close()
