"""Garbage collection, profiles, comparison of replicas, loss spikes, a progress file."""

from __future__ import annotations

import gc
import math
import statistics
import time
from collections import deque
from collections.abc import Callable, Iterable
from datetime import datetime
from pathlib import Path
from typing import Any

import torch

from megatron.core import device
from megatron.core.optimizer.replica_check import check_replicas
from megatron.training.hooks.base import Hook
from megatron.training.parts import TrainingParts
from megatron.training.state import StepResult, StopReason, TrainState


class CollectGarbage(Hook):
    """Collect at the same step on all ranks.

    Left to itself, Python collects at different moments on different ranks, and each collection
    stalls all of them.
    """

    def __init__(self, interval: int) -> None:
        self.interval = interval

    def before_training(self, state: TrainState) -> TrainState:
        """Switch automatic collection off."""
        gc.disable()
        gc.collect()
        return state

    def after_step(self, state: TrainState, result: StepResult) -> TrainState:
        """Collect when it is time."""
        if self.interval and state.iteration % self.interval == 0:
            gc.collect()
        return state

    def close(self) -> None:
        """Switch automatic collection on again."""
        gc.enable()


class Profile(Hook):
    """Records steps [first, last): a chrome trace by torch.profiler, or a range for nsys."""

    def __init__(
        self, first: int, last: int, directory: str, rank: int, *, use_torch: bool
    ) -> None:
        self.first, self.last = first, last
        self.path = Path(directory) / f"trace-rank{rank}.json"
        self.use_torch = use_torch or device.device_type() != "cuda"
        self._profiler: Any = None
        self._step: Any = None

    def before_step(self, state: TrainState) -> None:
        """Start before the first recorded step; mark each of them."""
        if state.iteration + 1 == self.first:
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

    def after_step(self, state: TrainState, result: StepResult) -> TrainState:
        """End the mark of the step; stop after the last recorded one."""
        self._end_step()
        if state.iteration + 1 == self.last:
            self._stop()
        return state

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
        """Write what was recorded, also if training ended early."""
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


class CompareReplicas(Hook):
    """Stops the run when ranks that hold copies of the same tensors hold other bits.

    Args:
        interval: steps between comparisons.
        save_intervals: steps between checkpoints of any kind, which a comparison precedes.
    """

    def __init__(
        self, parts: TrainingParts, interval: int, save_intervals: Iterable[int | None]
    ) -> None:
        self.parts = parts
        self.intervals = [interval, *(every for every in save_intervals if every)]
        self._last_compared = -1

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
        parts: Any = self.parts
        check_replicas(parts.model, parts.optimizer, parts.groups, iteration)
        self._last_compared = iteration


class WatchForSpikes(Hook):
    """Warns when a loss is far above the recent ones.

    The yardstick is the median of the last steps and their median absolute deviation, which one
    earlier spike does not move. The first losses of a run fall fast and are few: while there are
    fewer than a fifth of the window, only what is much farther away is a spike.
    """

    def __init__(
        self, warn: Callable[[str], None], *, window: int = 50, limit: float = 10.0
    ) -> None:
        self.warn = warn
        self.limit = limit
        self.window = window
        self._recent: dict[str, deque[float]] = {}

    def after_step(self, state: TrainState, result: StepResult) -> TrainState:
        """Compare every loss with its own past."""
        for name, value in result.losses.items():
            recent = self._recent.setdefault(name, deque(maxlen=self.window))
            if len(recent) >= 3 and math.isfinite(value):
                scarcity = max(1.0, self.window / 5 / len(recent))
                median = statistics.median(recent)
                spread = statistics.median(abs(v - median) for v in recent)
                distance = (value - median) / max(1.4826 * spread, 0.01 * abs(median), 1e-8)
                if distance > self.limit * scarcity**2:
                    last = state.consumed_train_samples
                    self.warn(
                        f" WARNING: iteration {state.iteration}: {name} {value:.6E} is"
                        f" {distance:.1f} deviations above the median {median:.6E} of the last"
                        f" {len(recent)} steps; grad norm {result.grad_norm}, samples"
                        f" {last - result.num_samples} to {last - 1}."
                    )
            if math.isfinite(value):
                recent.append(value)
        return state


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
            f"stopped by: {stop.value}\tElapsed: {seconds:.1f} s\tJob throughput (full square):"
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
