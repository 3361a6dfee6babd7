"""Scalars that a run wrote: the files of `--metrics-jsonl` and of TensorBoard, in one form."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from megatron.core.foundation.errors import DataError
from megatron.core.foundation.failure_file import FAILURE_HISTORY_FILE
from megatron.core.foundation.json_text import parse_json
from megatron.core.foundation.optional_imports import require

STEP_TIME = "iteration-time"
"""The scalar that every training step has, and no evaluation."""
_SETTING_SUFFIX = "/text_summary"


@dataclass(frozen=True)
class ScalarLine:
    """The scalars that were written together."""

    step: int
    time: float
    """Seconds since 1970; nan if the file does not say."""
    values: Mapping[str, float]


@dataclass(frozen=True)
class ScalarFile:
    """What one file says, in the order of writing."""

    path: Path
    lines: list[ScalarLine]
    settings: Mapping[str, str] = field(default_factory=dict)
    """Settings of the run as text, if they are in the file."""


def is_metrics_file(path: Path) -> bool:
    """Return whether the first line of a file is one of `--metrics-jsonl`."""
    if path.name == FAILURE_HISTORY_FILE:  # whose lines have iterations, too
        return False
    try:
        with path.open("rb") as file:
            first = parse_json(file.readline(1 << 20))
    except (OSError, ValueError):
        return False
    return isinstance(first, dict) and isinstance(first.get("iteration"), int)


def read_metrics_file(path: Path) -> ScalarFile:
    """Read a file of `--metrics-jsonl`; a last line that is being written is left out.

    Raises:
        DataError: another line is not one of such a file.
    """
    try:
        texts = path.read_bytes().split(b"\n")
    except OSError as error:
        raise DataError(
            f"{path}: {error.strerror}.",
            rule="a file that --metrics-jsonl has written",
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
    return ScalarFile(path, lines)


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
                # An evaluation after a step is a line of its own, as in the other file.
                key = event.step, name.rpartition(" ")[2] in ("validation", "test", "ppl")
                lines.setdefault(key, {})[name] = event.value
                times[key] = event.wall_time
        settings = {
            name.removesuffix(_SETTING_SUFFIX): _text_of(found.Tensors(name)[-1])
            for name in tags["tensors"]
            if name.endswith(_SETTING_SUFFIX)
        }
        yield ScalarFile(
            path, [ScalarLine(key[0], times[key], lines[key]) for key in sorted(lines)], settings
        )


def _text_of(event: object) -> str:
    values = list(getattr(getattr(event, "tensor_proto", None), "string_val", ()))
    return values[0].decode(errors="replace") if values else ""
