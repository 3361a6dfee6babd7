"""Checkpoints during the run and at its end."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from megatron.training.checkpointing import Checkpointer
from megatron.training.hooks.base import Hook
from megatron.training.resilience.progress import RunProgress
from megatron.training.state import StepResult, StopReason, TrainState


class SaveCheckpoints(Hook):
    """Saves every `interval` steps, and whatever the last save does not hold when the loop ends;
    every `short_lived_interval` steps in between, a short-lived checkpoint.

    An asynchronous save is committed at the step after its bytes are written; the end of the run
    waits for it.
    """

    def __init__(
        self,
        checkpointer: Checkpointer,
        interval: int | None,
        progress: RunProgress,
        short_lived_interval: int | None = None,
    ) -> None:
        self.checkpointer = checkpointer
        self.interval = interval
        self.progress = progress
        self.short_lived_interval = short_lived_interval
        self._last_saved: int | None = None
        self._has_ended = False

    def before_training(self, state: TrainState) -> TrainState:
        """Claim the directory, so that a second run in it ends at once."""
        self.checkpointer.claim()
        self._last_saved = state.iteration
        return state

    def after_step(self, state: TrainState, result: StepResult) -> TrainState:
        """Commit what the background has written, and save when it is time."""
        self.checkpointer.after_step()
        if self._last_saved is not None and not self.checkpointer.has_save_in_flight:
            self.progress.last_good_checkpoint = self._last_saved or None
        if self.interval is not None and state.iteration % self.interval == 0:
            self._save(state)
        elif self.short_lived_interval and state.iteration % self.short_lived_interval == 0:
            with self.progress.at("saving a short-lived checkpoint"):
                self.checkpointer.save_short_lived(state)
        return state

    def after_training(self, state: TrainState, stop: StopReason) -> TrainState:
        """Save the end of the run, for whatever reason it ended."""
        if state.iteration != self._last_saved:
            self._save(state)
        self.checkpointer.finish()
        self._has_ended = True
        return state

    def _save(self, state: TrainState) -> None:
        with self.progress.at("saving a checkpoint"):
            self.checkpointer.save(state)
            self._last_saved = state.iteration
        if not self.checkpointer.has_save_in_flight:
            self.progress.last_good_checkpoint = state.iteration

    def close(self) -> None:
        """Give the directory free.

        After a failure nothing is done: an unfinished save would wait for ranks that have left,
        and the lease of a process that is gone is taken over by the next run.
        """
        if self._has_ended:
            self.checkpointer.close()


class Export(Hook):
    """Writes the last checkpoint in another program's form once all steps are done."""

    def __init__(
        self, write: Callable[[Path], None], directory: str, progress: RunProgress
    ) -> None:
        self.write = write
        self.directory = Path(directory)
        self.progress = progress

    def after_training(self, state: TrainState, stop: StopReason) -> TrainState:
        """Export the checkpoint that was saved last."""
        if stop is StopReason.FINISHED:
            with self.progress.at("exporting the model"):
                self.write(self.directory)
        return state
