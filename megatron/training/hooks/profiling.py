"""Profiles of steps and of memory, and garbage collection at the same step on all ranks."""

from __future__ import annotations

import gc
from pathlib import Path
from typing import Any

import torch

from megatron.core.foundation import device
from megatron.training.hooks.base import Hook
from megatron.training.run.state import TakenStep, TrainState


class CollectGarbage(Hook):
    """Collects garbage at the same step on all ranks.

    Python's automatic collection runs at different times on different ranks, and each run stalls
    all ranks.

    Args:
        interval: steps between collections; 0 disables them.
        around_evaluation: collect before and after an evaluation as well.
    """

    def __init__(self, interval: int, *, around_evaluation: bool = False) -> None:
        self.interval = interval
        self.around_evaluation = around_evaluation

    def before_training(self, state: TrainState) -> TrainState:
        """Switch automatic collection off."""
        gc.disable()
        gc.collect()
        return state

    def after_step(self, state: TrainState, result: TakenStep) -> TrainState:
        """Collect if the interval ends."""
        if self.interval and state.iteration % self.interval == 0:
            gc.collect()
        return state

    def collect_around_evaluation(self) -> None:
        """Collect before or after an evaluation, if this is switched on."""
        if self.around_evaluation:
            gc.collect()

    def close(self) -> None:
        """Switch automatic collection on again."""
        gc.enable()


class Profile(Hook):
    """Records steps [first, last) as a Chrome trace of torch.profiler or as a range for nsys."""

    def __init__(
        self, first: int, last: int, directory: str, rank: int, *, use_torch: bool
    ) -> None:
        self.first, self.last = first, last
        self.path = Path(directory) / f"trace-rank{rank}.json"
        self.use_torch = use_torch or device.device_type() != "cuda"
        self._profiler: Any = None
        self._step: Any = None

    def before_step(self, state: TrainState) -> None:
        """Start the profiler before the first recorded step, and mark each recorded step."""
        if state.iteration + 1 == self.first and self._profiler is None:
            self._start()
        if self._profiler is not None:
            self._step = torch.profiler.record_function(f"step {state.iteration + 1}")
            self._step.__enter__()

    def _start(self) -> None:
        if not self.use_torch:
            device.start_profiler_range()
            return
        kinds = [torch.profiler.ProfilerActivity.CPU]
        if device.device_type() == "cuda":
            kinds.append(torch.profiler.ProfilerActivity.CUDA)
        self._profiler = torch.profiler.profile(activities=kinds)
        self._profiler.__enter__()

    def after_step(self, state: TrainState, result: TakenStep) -> TrainState:
        """End the mark of the step; stop the profiler after the last recorded step."""
        self._end_step()
        if state.iteration + 1 == self.last:
            self._stop()
        return state

    def after_roll_back(self, state: TrainState) -> None:
        """End the mark of the step that was rolled back."""
        self._end_step()

    def _end_step(self) -> None:
        if self._step is not None:
            self._step.__exit__(None, None, None)
            self._step = None

    def _stop(self) -> None:
        self._end_step()
        if self._profiler is not None:
            self._profiler.__exit__(None, None, None)
            self.path.parent.mkdir(parents=True, exist_ok=True)
            self._profiler.export_chrome_trace(str(self.path))
            self._profiler = None
            print(
                f" profile of steps {self.first} to {self.last - 1} on this rank: {self.path}"
                " (open it at https://ui.perfetto.dev)",
                flush=True,
            )
        elif not self.use_torch:
            device.stop_profiler_range()

    def close(self) -> None:
        """Write the trace if training ended before the last recorded step."""
        if self._profiler is not None:
            self._stop()


class MemoryHistory(Hook):
    """Records allocations on a GPU and writes them when training ends."""

    def __init__(self, path: str) -> None:
        self.path = path

    def before_training(self, state: TrainState) -> TrainState:
        """Start recording."""
        device.record_memory_history(max_entries=100_000)
        return state

    def close(self) -> None:
        """Write the record, for https://pytorch.org/memory_viz."""
        device.dump_memory_history(self.path)
