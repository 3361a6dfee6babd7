"""Counters of the run for others: Megatron's `args`, the failure report, progress.txt."""

from __future__ import annotations

import time
from datetime import datetime
from pathlib import Path

from megatron.core.foundation.heartbeat.layout import Word
from megatron.core.foundation.heartbeat.place import PLACE
from megatron.training import global_vars
from megatron.training.hooks.base import Hook
from megatron.training.resilience.status import RunStatus
from megatron.training.run.state import StepResult, StopReason, TrainState


class PublishCounters(Hook):
    """Writes the counters where others look for them. Nothing in the loop reads them there."""

    def __init__(self, status: RunStatus) -> None:
        self.status = status

    def before_training(self, state: TrainState) -> TrainState:
        """Publish the counters of a resumed run."""
        PLACE.note(Word.NUM_STEPS, 0)
        self.status.activity = "training"
        self._publish(state)
        return state

    def before_step(self, state: TrainState) -> None:
        """Name the step that runs now."""
        self.status.iteration = state.iteration + 1
        global_vars.get_args().curr_iteration = state.iteration

    def after_step(self, state: TrainState, result: StepResult) -> TrainState:
        """Publish the counters."""
        PLACE.note(Word.NUM_STEPS, PLACE.words[Word.NUM_STEPS] + 1)
        self._publish(state)
        return state

    def after_roll_back(self, state: TrainState) -> None:
        """Publish where the run stands again."""
        self._publish(state)

    def _publish(self, state: TrainState) -> None:
        args = global_vars.get_args()
        self.status.iteration = args.iteration = state.iteration
        args.consumed_train_samples = state.consumed_train_samples
        args.consumed_valid_samples = state.consumed_valid_samples
        args.skipped_train_samples = state.skipped_train_samples
        args.num_floating_point_operations_so_far = state.flops_so_far


class ProgressFile(Hook):
    """Appends a line to progress.txt in the save directory at the start and at the end."""

    def __init__(self, directory: str, world_size: int) -> None:
        self.path = Path(directory) / "progress.txt"
        self.world_size = world_size
        self._started_at = time.perf_counter()
        self._flops_at_start = 0.0

    def before_training(self, state: TrainState) -> TrainState:
        """Note where the run begins."""
        self._flops_at_start = state.flops_so_far
        self._append(state, "starting job")
        return state

    def after_training(self, state: TrainState, stop: StopReason) -> TrainState:
        """Note where it ends, and what it cost."""
        seconds = time.perf_counter() - self._started_at
        done = state.flops_so_far - self._flops_at_start
        rate = done / (seconds * self.world_size) / 1e12
        self._append(
            state,
            f"stopped by: {stop.value}\tElapsed: {seconds:.1f} s\tJob throughput (causal):"
            f" {rate:.4f} TFLOP/s/GPU\tFloating-point operations so far: {state.flops_so_far:.3e}",
        )
        return state

    def _append(self, state: TrainState, text: str) -> None:
        self.path.parent.mkdir(parents=True, exist_ok=True)
        stamp = datetime.now().strftime("%Y-%m-%d %H:%M:%S")
        with self.path.open("a", encoding="utf-8") as file:
            file.write(
                f"{stamp}\t# GPUs: {self.world_size}\tIteration: {state.iteration}\t{text}\n"
            )
