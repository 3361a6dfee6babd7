"""Read the files of a run: scalars, settings, attempts, failures, checkpoints."""

from __future__ import annotations

import contextlib
import math
import os
import statistics
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path
from typing import Any

from megatron.core.dist_checkpointing import commit
from megatron.core.foundation.errors import CheckpointError, DataError
from megatron.core.foundation.failure_file import FAILURE_FILE, FAILURE_HISTORY_FILE
from megatron.core.foundation.json_text import parse_json
from megatron.core.foundation.optional_imports import require
from megatron.training.checkpointing.stored_settings import stored_args
from megatron.training.config.run import plain

STEP_TIME = "iteration-time"
"""The scalar of every training step; evaluations do not have it."""
MEDIANS = (
    (STEP_TIME, "time of a step (ms)", 1e3),
    ("tokens-per-second-per-device", "tokens/s per device", 1.0),
    ("throughput", "TFLOP/s per device", 1.0),
    ("mem-max-allocated-bytes", "peak memory (GiB)", 2.0**-30),
)
"""Scalar of a run, its title with the unit, and the factor to this unit."""
_SETTING_SUFFIX = "/text_summary"
PROGRESS_FILE = "progress.txt"
_DEPTH = 3
"""Number of directory levels below the run's directory that are searched."""


@dataclass(frozen=True)
class ScalarLine:
    """Scalars of one line."""

    step: int
    time: float
    """Seconds since 1970; nan if the file has no time."""
    values: Mapping[str, float]


@dataclass(frozen=True)
class ScalarFile:
    """The content of one file, in the order of writing."""

    lines: list[ScalarLine]
    settings: Mapping[str, str] = field(default_factory=dict)
    """Settings of the run as text. Only TensorBoard's files have them."""


def is_metrics_file(path: Path) -> bool:
    """Return whether the first line of a file is one of `--metrics-jsonl`."""
    if path.name == FAILURE_HISTORY_FILE:  # its lines have iterations too
        return False
    try:
        with path.open("rb") as file:
            first = parse_json(file.readline(1 << 20))
    except (OSError, ValueError):
        return False
    return isinstance(first, dict) and isinstance(first.get("iteration"), int)


def read_metrics_file(path: Path) -> ScalarFile:
    """Read a file of `--metrics-jsonl`. An unfinished last line is ignored.

    Raises:
        DataError: the file cannot be read, or another line is not a JSON object of scalars.
    """
    try:
        texts = path.read_bytes().split(b"\n")
    except OSError as error:
        raise DataError(
            f"{path}: {error.strerror}.",
            rule="it is a file of --metrics-jsonl",
            flags=["--metrics-jsonl"],
            fix="name the file of a run, or its directory",
        ) from error
    lines = []
    for number, text in enumerate(texts[:-1], 1):
        try:
            lines.append(_scalar_line(parse_json(text)))
        except (ValueError, TypeError, KeyError, AttributeError) as error:
            raise DataError(
                f"{path}, line {number}: not a line of scalars: {error}.",
                rule="each line is a JSON object with an iteration and numbers",
                flags=["--metrics-jsonl"],
                fix="remove the line, or name the file of another run",
            ) from error
    return ScalarFile(lines)


def _scalar_line(fields: dict[str, object]) -> ScalarLine:
    step, time = fields["iteration"], fields.get("time", math.nan)
    if not isinstance(step, int) or not isinstance(time, float | int):
        raise TypeError("its iteration or time is no number")
    values = {
        name: float(value)
        for name, value in fields.items()
        if isinstance(value, float | int) and name not in ("iteration", "time")
    }
    return ScalarLine(step, float(time), values)


def read_event_files(paths: Iterable[Path]) -> Iterator[ScalarFile]:
    """Read event files of TensorBoard, each written by one attempt of a run.

    Raises:
        MissingExtraError: TensorBoard is not installed.
    """
    events = require(
        "tensorboard.backend.event_processing.event_accumulator", purpose="a TensorBoard directory"
    )
    for path in sorted(paths):
        found = events.EventAccumulator(str(path), size_guidance={"scalars": 0, "tensors": 0})
        found.Reload()
        tags = found.Tags()
        lines: dict[tuple[int, bool], dict[str, float]] = {}
        times: dict[tuple[int, bool], float] = {}
        for name in tags["scalars"]:
            for event in found.Scalars(name):
                # An evaluation after a step is a separate line, as in files of --metrics-jsonl.
                key = event.step, name.rpartition(" ")[2] in ("validation", "test", "ppl")
                lines.setdefault(key, {})[name] = event.value
                times[key] = event.wall_time
        settings = {
            name.removesuffix(_SETTING_SUFFIX): _text_of(found.Tensors(name)[-1])
            for name in tags["tensors"]
            if name.endswith(_SETTING_SUFFIX)
        }
        yield ScalarFile(
            [ScalarLine(key[0], times[key], lines[key]) for key in sorted(lines)], settings
        )


def _text_of(event: object) -> str:
    values = list(getattr(getattr(event, "tensor_proto", None), "string_val", ()))
    return values[0].decode(errors="replace") if values else ""


@dataclass(frozen=True)
class Series:
    """A scalar over the steps. The value of a repeated step is from its last attempt."""

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
    """The steps of one start of the run."""

    first_step: int
    last_step: int
    begin: float
    """End of its first step, in seconds since 1970; nan if unknown."""
    end: float
    """End of its last step."""


@dataclass(frozen=True)
class SavedCheckpoint:
    """A checkpoint in the save directory."""

    iteration: int | str
    path: Path
    num_bytes: int
    time: float


@dataclass(frozen=True)
class RunRecord:
    """The contents of a run's files."""

    name: str
    series: Mapping[str, Series]
    settings: Mapping[str, str]
    """Name -> value as text."""
    attempts: list[Attempt] = field(default_factory=list)
    failures: list[dict[str, Any]] = field(default_factory=list)
    """Records of failure.json, oldest first."""
    has_failed: bool = False
    """Whether the last attempt ended with a failure."""
    checkpoints: list[SavedCheckpoint] = field(default_factory=list)

    @property
    def last_step(self) -> int:
        """The newest step; 0 if there is none."""
        return max((series.steps[-1] for series in self.series.values()), default=0)

    @property
    def losses(self) -> dict[str, Series]:
        """The training losses: scalars that end in `loss` or have an evaluation."""
        evaluated = {name.rpartition(" validation")[0] for name in self.series}
        return {
            name: series
            for name, series in self.series.items()
            if (name in evaluated or name.endswith("loss"))
        }

    @property
    def num_ranks(self) -> int | None:
        """Ranks of the run; None if its settings are unknown."""
        if not self.settings.get("data_parallel_size", "").isdigit():
            return None
        axes = ("data", "tensor_model", "pipeline_model", "context")
        sizes = [self.settings.get(f"{axis}_parallel_size", "") for axis in axes]
        return math.prod(int(size) for size in sizes if size.isdigit())

    @property
    def wall_s(self) -> float:
        """Seconds from the beginning of the first step to the end of the last; nan if unknown."""
        if not self.attempts or STEP_TIME not in self.series:
            return math.nan
        first = self.series[STEP_TIME].values[0]
        return self.attempts[-1].end - self.attempts[0].begin + first

    @property
    def goodput(self) -> float:
        """Time of the steps that were not repeated / `wall_s`; nan if unknown."""
        if not self.wall_s > 0:
            return math.nan
        return min(1.0, sum(self.series[STEP_TIME].finite()) / self.wall_s)


def read_run(path: Path) -> RunRecord:
    """Read all files of a run.

    Args:
        path: a file of `--metrics-jsonl`, or a directory. The files of the run (metrics, event
            files of TensorBoard, checkpoints, failures) are searched in it and up to three levels
            below.
    Raises:
        DataError: there are no scalars, or the scalars of several runs.
        MissingExtraError: there are only event files, and TensorBoard is not installed.
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
            fix="name the file or directory in the flags of the run",
        )
    # Prefer the file of --metrics-jsonl, which has all digits.
    of_events = list(read_event_files(events)) if not metrics else []
    files = [read_metrics_file(metrics[0])] if metrics else of_events
    return _record(path.resolve().name, files, directories)


def _directories(root: Path, depth: int = _DEPTH) -> Iterator[Path]:
    """Yield a directory and the directories below it that may belong to the run."""
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
    """Join the lines of all attempts; the last value of a repeated step is used."""
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
    """Split at the begin of a file, where step numbers decrease, and at a start in progress.txt."""
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
    """Return the start times of attempts in progress.txt."""
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
    """Return the failure records of a save directory, oldest first."""
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
