"""Scalars and times of an engine's steps: TensorBoard, Weights & Biases, CSV files.

Scalars have DeepSpeed's names, and their steps count samples: `Train/Samples/train_loss`, `.../lr`,
`.../loss_scale`, and with `wall_clock_breakdown` the times of the parts of a step. The first
process writes them; its loss is the mean over its own micro batches.
"""

from __future__ import annotations

import csv
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from torch import Tensor

from megatron.core.foundation import optional_imports
from megatron.core.timers import Timers
from megatron.training.hooks.scalars import ScalarSink, TensorBoardSink, WandbSink
from megatron_lattice.deepspeed.reading import ReadSettings
from megatron_lattice.deepspeed.settings import EngineSettings

Event = tuple[str, Any, int]
"""Name, value, and the number of samples so far."""

PARTS = ("forward", "backward", "reduce", "step")
"""Parts of a step: forward and backward of micro batches, gradient reduction, update."""


class CsvSink:
    """One file for each scalar, with the columns step and value."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        directory.mkdir(parents=True, exist_ok=True)

    def write(self, scalars: dict[str, float], step: int) -> None:
        """Append one line to the file of each scalar."""
        for name, value in scalars.items():
            path = self.directory / f"{name.replace('/', '_')}.csv"
            is_new = not path.exists()
            with path.open("a", newline="") as file:
                lines = csv.writer(file)
                if is_new:
                    lines.writerow(["step", name])
                lines.writerow([step, value])

    def close(self) -> None:
        """Do nothing: each write closes its file."""


class MonitorMaster:
    """The sinks of a configuration, on the first process; other processes have none."""

    def __init__(self, settings: EngineSettings, is_first: bool = True) -> None:
        self.sinks: list[ScalarSink] = []
        self.destinations: list[str] = []
        self._tensorboard: Any = None
        if is_first and settings["tensorboard.enabled"]:
            optional_imports.require("tensorboard", purpose="tensorboard.enabled")
            module = optional_imports.require(
                "torch.utils.tensorboard", purpose="tensorboard.enabled"
            )
            directory = destination_of(settings, "tensorboard")
            self._tensorboard = module.SummaryWriter(log_dir=str(directory))
            self.sinks.append(TensorBoardSink(self._tensorboard))
            self.destinations.append(f"tensorboard: {directory}")
        if is_first and settings["csv_monitor.enabled"]:
            directory = destination_of(settings, "csv_monitor")
            self.sinks.append(CsvSink(directory))
            self.destinations.append(f"csv_monitor: {directory}")
        if is_first and settings["wandb.enabled"]:
            project = settings["wandb.project"] or "deepspeed"
            wandb = optional_imports.require("wandb", purpose="wandb.enabled")
            wandb.init(
                project=project, group=settings["wandb.group"], entity=settings["wandb.team"]
            )
            self.sinks.append(WandbSink(wandb))
            self.destinations.append(f"wandb: project {project}")

    @property
    def enabled(self) -> bool:
        """Whether this process writes anything."""
        return bool(self.sinks)

    def write_events(self, event_list: Sequence[Event]) -> None:
        """Write (name, value, number of samples) tuples; a script may call it as well."""
        by_step: dict[int, dict[str, float]] = {}
        for name, value, step in event_list:
            by_step.setdefault(step, {})[name] = float(value)
        for step, scalars in by_step.items():
            for sink in self.sinks:
                sink.write(scalars, step)
        if self._tensorboard is not None:
            self._tensorboard.flush()

    def close(self) -> None:
        """Close all files."""
        for sink in self.sinks:
            sink.close()
        self.sinks, self._tensorboard = [], None


def destination_of(settings: EngineSettings | ReadSettings, section: str) -> Path:
    """Return a monitor's directory: `job_name` in `output_path`, by default in the home."""
    base = settings[f"{section}.output_path"] or os.path.join(os.path.expanduser("~"), section)
    return Path(base) / (settings[f"{section}.job_name"] or "DeepSpeedJobName")


class StepTimes:
    """Times of the parts of steps, with `wall_clock_breakdown`; each part synchronizes the device.

    Without `wall_clock_breakdown` nothing is measured.
    """

    def __init__(self, is_on: bool) -> None:
        self.is_on = is_on
        self.timers = Timers(2 if is_on else -1, "max")

    @contextmanager
    def of(self, part: str) -> Iterator[None]:
        """Add the time of the block to one of `PARTS`."""
        timer = self.timers(part, log_level=0)
        timer.start()
        try:
            yield
        finally:
            timer.stop()

    def take(self) -> dict[str, float]:
        """Return the milliseconds of each part since the last call, and reset them."""
        return {p: 1000.0 * self.timers(p, log_level=0).elapsed() for p in PARTS}

    @staticmethod
    def describe(milliseconds: dict[str, float]) -> str:
        """Return a line with the time of each part and its share."""
        total = sum(milliseconds.values()) or 1.0
        shown = [f"{p}: {t:.2f} ({100 * t / total:.0f} %)" for p, t in milliseconds.items()]
        return "time (ms) | " + " | ".join(shown)


class LossMean:
    """Mean of this process's losses since the last `take`."""

    def __init__(self) -> None:
        self._total: Tensor | None = None
        self._count = 0

    def add(self, loss: Tensor) -> None:
        """Add the loss of a micro batch without synchronizing the device."""
        value = loss.detach().float()
        self._total = value if self._total is None else self._total + value
        self._count += 1

    def take(self) -> float | None:
        """Return the mean and reset it; None if there was no loss."""
        if self._total is None:
            return None
        mean = float(self._total) / self._count
        self._total, self._count = None, 0
        return mean
