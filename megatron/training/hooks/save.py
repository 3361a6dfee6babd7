"""Checkpoints during the run and at its end."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from megatron.core.foundation.errors import CheckpointError
from megatron.core.transport import torch_collectives
from megatron.core.transport.object_collectives import any_across_ranks
from megatron.resilience.status import RunStatus
from megatron.training.checkpointing import Checkpointer
from megatron.training.checkpointing.memory import MemoryCheckpoints
from megatron.training.hooks.base import Hook
from megatron.training.launch.printing import print_rank_0
from megatron.training.run.state import RanksChange, StopReason, TakenStep, TrainState


class SaveCheckpoints(Hook):
    """Saves a checkpoint every `interval` steps and at the end, and a non-persistent checkpoint
    every `non_persistent_interval` steps in between.

    An asynchronous save is committed at the first step after its bytes are written, or at the end
    of the run. Up to `allowed_failures` consecutive saves may fail with a warning: earlier
    checkpoints are intact, and the next interval saves again. The save at the end must succeed.
    """

    def __init__(
        self,
        checkpointer: Checkpointer,
        interval: int | None,
        status: RunStatus,
        non_persistent_interval: int | None = None,
        allowed_failures: int = 0,
    ) -> None:
        self.checkpointer = checkpointer
        self.interval = interval
        self.status = status
        self.non_persistent_interval = non_persistent_interval
        self.allowed_failures = allowed_failures
        self._num_failures = 0
        self._began_at: int | None = None
        self._last_saved: int | None = None
        self._has_ended = False

    def before_training(self, state: TrainState) -> TrainState:
        """Lock the save directory, so that a second run in it fails at once."""
        self.checkpointer.claim()
        self._began_at = self._last_saved = state.iteration
        return state

    def after_step(self, state: TrainState, result: TakenStep) -> TrainState:
        """Commit a finished asynchronous save, and save if an interval ends."""
        self._attempt("committing a checkpoint", self.checkpointer.after_step)
        if self._last_saved is not None and not self.checkpointer.has_save_in_flight:
            self.status.last_good_checkpoint = self._last_saved or None
        if self.interval is not None and state.iteration % self.interval == 0:
            self._finish_earlier()
            self._attempt("saving a checkpoint", lambda: self._save(state))
        elif self.non_persistent_interval and state.iteration % self.non_persistent_interval == 0:
            self._attempt(
                "saving a non-persistent checkpoint",
                lambda: self.checkpointer.save_non_persistent(state),
            )
        return state

    def after_training(self, state: TrainState, stop: StopReason) -> TrainState:
        """Save the last step, whatever the stop reason."""
        self._finish_earlier()
        with self.status.doing("saving a checkpoint"):
            if state.iteration != self._last_saved:
                self._save(state)
            self.checkpointer.finish()
        self._has_ended = True
        return state

    def _finish_earlier(self) -> None:
        """Commit an asynchronous save, so that its failure does not count for the next save."""
        if self.checkpointer.has_save_in_flight:
            self._attempt("committing a checkpoint", self.checkpointer.finish)

    def _attempt(self, doing: str, function: Callable[[], None]) -> None:
        """Call a collective of the checkpointer; all ranks raise its errors or count a failure."""
        outer, committed = self.status.activity, self.checkpointer.last_committed
        try:
            with self.status.doing(doing):
                function()
        except CheckpointError as error:
            self._num_failures += 1
            if self._num_failures > self.allowed_failures:
                raise
            self.status.activity = outer
            newest = self.checkpointer.last_committed
            self._last_saved = self._began_at if newest is None else newest
            print_rank_0(
                f"WARNING: {doing} failed, and training continues: failure {self._num_failures} of "
                f"{self.allowed_failures} in a row that --allowed-save-failures lets pass\n{error}"
            )
            return
        if self.checkpointer.last_committed != committed:
            self._num_failures = 0

    def _save(self, state: TrainState) -> None:
        self.checkpointer.save(state)
        self._last_saved = state.iteration
        if not self.checkpointer.has_save_in_flight:
            self.status.last_good_checkpoint = state.iteration

    def close(self) -> None:
        """Unlock the save directory, unless training has failed.

        After a failure, an unfinished save would wait for ranks that have ended. The next run takes
        over the lock of a process that has ended.
        """
        if self._has_ended:
            self.checkpointer.close()


class CopyState(Hook):
    """Copies the state to the memory of the ranks every `interval` steps, so that the remaining
    ranks can continue after a rank is lost; ends the loop if new ranks wait to join.

    Args:
        waits_to_grow: returns whether this rank has news of waiting ranks; None if no rank is
            missing.
    """

    def __init__(
        self,
        memory: MemoryCheckpoints,
        interval: int,
        status: RunStatus,
        waits_to_grow: Callable[[], bool] | None,
    ) -> None:
        self.memory, self.interval, self.status = memory, interval, status
        self.waits_to_grow = waits_to_grow

    def before_training(self, state: TrainState) -> TrainState:
        """Copy the loaded state, because new ranks have no copy yet."""
        if state.iteration:
            self.memory.save(state)
        return state

    def after_step(self, state: TrainState, result: TakenStep) -> TrainState:
        """Copy the state if the interval ends or new ranks wait.

        Raises:
            RanksChange: on all ranks, if any rank has news of waiting ranks.
        """
        is_left = self.waits_to_grow is not None and any_across_ranks(
            self.waits_to_grow(), torch_collectives.world()
        )
        if is_left or state.iteration % self.interval == 0:
            with self.status.doing("copying the state"):
                self.memory.save(state)
        if is_left:
            raise RanksChange("others wait to join")
        return state


class Export(Hook):
    """Writes the last checkpoint in another program's format after the last step."""

    def __init__(self, write: Callable[[Path], None], directory: str, status: RunStatus) -> None:
        self.write = write
        self.directory = Path(directory)
        self.status = status

    def after_training(self, state: TrainState, stop: StopReason) -> TrainState:
        """Export the last checkpoint."""
        if stop is StopReason.FINISHED:
            with self.status.doing("exporting the model"):
                self.write(self.directory)
        return state
