"""Publish the counters of the run: Megatron's `args`, the failure report, progress.txt."""

from __future__ import annotations

import time
from datetime import datetime
from pathlib import Path

from megatron.core.foundation.flight_recorder import PROGRESS, Field
from megatron.resilience.status import RunStatus
from megatron.training import global_vars
from megatron.training.hooks.base import Hook
from megatron.training.run.state import StopReason, TakenStep, TrainState


class PublishCounters(Hook):
    """Writes the counters to Megatron's `args` and the run status. The loop does not read them."""

    def __init__(self, status: RunStatus) -> None:
        self.status = status

    def before_training(self, state: TrainState) -> TrainState:
        """Publish the counters of a resumed run."""
        PROGRESS.set_field(Field.NUM_STEPS, 0)
        self.status.activity = "training"
        self._publish(state)
        return state

    def before_step(self, state: TrainState) -> None:
        """Publish the number of the running step."""
        self.status.iteration = state.iteration + 1
        global_vars.get_args().curr_iteration = state.iteration

    def after_step(self, state: TrainState, result: TakenStep) -> TrainState:
        """Publish the counters."""
        PROGRESS.set_field(Field.NUM_STEPS, PROGRESS.fields[Field.NUM_STEPS] + 1)
        self._publish(state)
        return state

    def after_roll_back(self, state: TrainState) -> None:
        """Publish the earlier counters."""
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
        """Append a line with the first iteration."""
        self._flops_at_start = state.flops_so_far
        self._append(state, "starting job")
        return state

    def after_training(self, state: TrainState, stop: StopReason) -> TrainState:
        """Append a line with the last iteration and the cost of the run."""
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
