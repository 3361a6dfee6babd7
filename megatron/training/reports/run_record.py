"""What a run wrote into its directories: scalars, settings, attempts, failures, checkpoints."""

from __future__ import annotations

import contextlib
import math
import os
import statistics
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path
from typing import Any

from megatron.core.dist_checkpointing import commit
from megatron.core.foundation.errors import CheckpointError, DataError
from megatron.core.foundation.failure_file import FAILURE_FILE, FAILURE_HISTORY_FILE
from megatron.core.foundation.json_text import parse_json
from megatron.training.checkpointing.stored_settings import stored_args
from megatron.training.config.run import plain
from megatron.training.reports.scalar_files import (
    STEP_TIME,
    ScalarFile,
    ScalarLine,
    is_metrics_file,
    read_event_files,
    read_metrics_file,
)

PROGRESS_FILE = "progress.txt"
_AXES = ("data", "tensor_model", "pipeline_model", "context")
_DEPTH = 3
"""Levels of directories below that of the run that are searched."""


@dataclass(frozen=True)
class Series:
    """A scalar over the steps, as the last attempt that took a step saw it."""

    steps: Sequence[int]
    values: Sequence[float]

    def finite(self) -> list[float]:
        """Return the values that are finite."""
        return [value for value in self.values if math.isfinite(value)]

    def median(self) -> float:
        """Return the median of the finite values; nan if there are none."""
        values = self.finite()
        return statistics.median(values) if values else math.nan


@dataclass(frozen=True)
class Attempt:
    """Steps that one start of the run took."""

    first_step: int
    last_step: int
    begin: float
    """When its first step ended, in seconds since 1970; nan if unknown."""
    end: float


@dataclass(frozen=True)
class SavedCheckpoint:
    """A checkpoint in the save directory."""

    iteration: int | str
    path: Path
    num_bytes: int
    time: float


@dataclass(frozen=True)
class RunRecord:
    """Everything known of a run."""

    name: str
    series: Mapping[str, Series]
    settings: Mapping[str, str]
    """Name of each setting -> its value as text."""
    attempts: list[Attempt] = field(default_factory=list)
    failures: list[dict[str, Any]] = field(default_factory=list)
    """Records of failure.json, oldest first."""
    has_failed: bool = False
    """Whether the newest attempt ended with a failure."""
    checkpoints: list[SavedCheckpoint] = field(default_factory=list)

    @property
    def last_step(self) -> int:
        """The newest step; 0 if there is none."""
        return max((series.steps[-1] for series in self.series.values()), default=0)

    @property
    def losses(self) -> dict[str, Series]:
        """The training losses: scalars of which there are evaluations, and all named loss."""
        evaluated = {name.rpartition(" validation")[0] for name in self.series}
        return {
            name: series
            for name, series in self.series.items()
            if (name in evaluated or name.endswith("loss"))
        }

    def number(self, setting: str) -> int | None:
        """Return a setting that is a whole number; None if it is unknown or none."""
        text = self.settings.get(setting, "")
        return int(text) if text.lstrip("-").isdigit() else None

    @property
    def num_ranks(self) -> int | None:
        """Ranks of the run; None if its layout is unknown."""
        sizes = [self.number(f"{axis}_parallel_size") for axis in _AXES]
        return math.prod(size or 1 for size in sizes) if sizes[0] else None

    @property
    def wall_s(self) -> float:
        """Seconds from the first step to the last one, with everything between; nan if unknown."""
        if not self.attempts or STEP_TIME not in self.series:
            return math.nan
        first = self.series[STEP_TIME].values[0]
        return self.attempts[-1].end - self.attempts[0].begin + first

    @property
    def goodput(self) -> float:
        """Share of that time spent in steps that no later attempt took again; nan if unknown."""
        if not self.wall_s > 0:
            return math.nan
        return min(1.0, sum(self.series[STEP_TIME].finite()) / self.wall_s)


def read_run(path: Path) -> RunRecord:
    """Collect what a run wrote.

    Args:
        path: a file of `--metrics-jsonl`, or a directory that has the files of one run in it or
            up to three levels below: metrics, event files of TensorBoard, checkpoints, failures.
    Raises:
        DataError: there are no scalars, or those of several runs.
        MissingExtraError: the scalars are TensorBoard's, which is not installed.
    """
    if path.is_file():
        return _record(path.stem, [read_metrics_file(path)], [])
    directories = list(_directories(path))
    metrics = [f for d in directories for f in sorted(d.glob("*.jsonl")) if is_metrics_file(f)]
    events = [f for d in directories for f in d.glob("events.out.tfevents.*")]
    if len(metrics) > 1 or len({file.parent for file in events}) > 1:
        found = ", ".join(str(f) for f in (metrics or sorted({file.parent for file in events})))
        raise DataError(
            f"{path} has the scalars of several runs: {found}.",
            rule="a report is about one run",
            fix="name one of them",
        )
    if not metrics and not events:
        raise DataError(
            f"{path} has no scalars of a run.",
            rule="the curves come from --metrics-jsonl FILE or --tensorboard-dir DIRECTORY",
            flags=["--metrics-jsonl", "--tensorboard-dir"],
            fix="name the file or the directory that the run was given",
        )
    # With both, the one with all digits; settings are in TensorBoard's alone.
    of_events = list(read_event_files(events)) if not metrics else []
    files = [read_metrics_file(metrics[0])] if metrics else of_events
    return _record(path.resolve().name, files, directories)


def _directories(root: Path, depth: int = _DEPTH) -> Iterator[Path]:
    """Yield a directory and those below it in which a run may have written."""
    if not root.is_dir():
        return
    yield root
    if depth == 0:
        return
    for child in sorted(root.iterdir()):
        is_other = child.name.startswith((".", "iter_")) or (child / "pyvenv.cfg").exists()
        if child.is_dir() and not child.is_symlink() and not is_other:
            yield from _directories(child, depth - 1)


def _record(name: str, files: list[ScalarFile], directories: list[Path]) -> RunRecord:
    starts = [time for d in directories for time in _start_times(d / PROGRESS_FILE)]
    attempts = list(_attempts(files, starts))
    settings: dict[str, str] = {}
    for file in files:
        settings |= file.settings
    checkpoints: list[SavedCheckpoint] = []
    failures: list[dict[str, Any]] = []
    for directory in directories:
        checkpoints += _checkpoints(directory)
        settings |= _stored_settings(directory)
        failures += _failures(directory)
    return RunRecord(
        name=name,
        series=_series(files),
        settings=settings,
        attempts=attempts,
        failures=failures,
        has_failed=any((directory / FAILURE_FILE).exists() for directory in directories),
        checkpoints=checkpoints,
    )


def _series(files: list[ScalarFile]) -> dict[str, Series]:
    """Join the lines of all attempts; of a step that was taken twice, the later one counts."""
    values: dict[str, dict[int, float]] = {}
    for file in files:
        for line in file.lines:
            for name, value in line.values.items():
                values.setdefault(name, {})[line.step] = value
    return {
        name: Series(sorted(of_step), [of_step[step] for step in sorted(of_step)])
        for name, of_step in values.items()
    }


def _attempts(files: list[ScalarFile], starts: Sequence[float]) -> Iterator[Attempt]:
    """Cut the steps where a file ends, where they go back, and where progress.txt has a start."""
    for file in files:
        lines = [line for line in file.lines if STEP_TIME in line.values]
        begin = 0
        for index in range(1, len(lines) + 1):
            is_cut = index == len(lines) or _restarts(lines[index - 1], lines[index], starts)
            if is_cut and index > begin:
                first, last = lines[begin], lines[index - 1]
                yield Attempt(first.step, last.step, first.time, last.time)
                begin = index


def _restarts(before: ScalarLine, after: ScalarLine, starts: Sequence[float]) -> bool:
    return after.step <= before.step or any(before.time < s < after.time for s in starts)


def _start_times(path: Path) -> list[float]:
    """Return when attempts began, from progress.txt."""
    if not path.exists():
        return []
    times = []
    for line in path.read_text(encoding="utf-8", errors="replace").splitlines():
        if "starting job" in line:
            with contextlib.suppress(ValueError):
                stamp = line.partition("\t")[0]
                times.append(datetime.strptime(stamp, "%Y-%m-%d %H:%M:%S").timestamp())
    return times


def _failures(directory: Path) -> list[dict[str, Any]]:
    """Return the records of the failures of a save directory, oldest first."""
    history, newest = directory / FAILURE_HISTORY_FILE, directory / FAILURE_FILE
    texts = history.read_bytes().splitlines() if history.exists() else []
    if not texts and newest.exists():
        texts = [newest.read_bytes()]
    records = []
    for text in texts:
        with contextlib.suppress(ValueError):
            record = parse_json(text)
            if isinstance(record, dict):
                records.append(record)
    return records


def _checkpoints(directory: Path) -> list[SavedCheckpoint]:
    found = []
    for each in reversed(commit.list_checkpoints(directory).checkpoints):
        path = Path(str(each.path))
        files = [entry.stat() for entry in path.rglob("*") if entry.is_file()]
        num_bytes = sum(file.st_size for file in files)
        found.append(SavedCheckpoint(each.iteration, path, num_bytes, os.stat(path).st_mtime))
    return found


def _stored_settings(directory: Path) -> dict[str, str]:
    """Return the settings in the newest checkpoint of a directory."""
    if not commit.list_checkpoints(directory).checkpoints:
        return {}
    try:
        stored = stored_args(str(directory))
    except CheckpointError:
        return {}
    values = {} if stored is None else vars(stored)
    return {name: str(plain(value)) for name, value in values.items()}
