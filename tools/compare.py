"""Compare two runs: losses and gradient norms to the bit, speed, memory, settings.

    python tools/compare.py run other_run

A run is a directory with its files, or its file of --metrics-jsonl, which has all digits.
`tools/report.py RUN --against OTHER` draws the curves of both.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from megatron.core.foundation.exit_status import ExitStatus, tool
from megatron.core.settings.command_line import read_command_line
from megatron.core.settings.flags import positional
from megatron.training.config.run import all_flags
from megatron.training.reports import MEDIANS, RunRecord, Series, read_run


@dataclass(frozen=True, kw_only=True)
class Flags:
    """Runs to compare."""

    run: Path = positional(metavar="RUN")
    """Directory of a run, or its file of --metrics-jsonl."""
    other: Path = positional(metavar="OTHER")
    """The run to compare it with."""
    check_equal: bool = False
    """Exit with 1 unless all losses and gradient norms are equal at the steps of both runs."""


@dataclass(frozen=True)
class CurveDifference:
    """The differences of a scalar between two runs, over the steps of both."""

    name: str
    num_steps: int
    first_step: int | None
    """The first step with different values; None if there is none."""
    largest: float
    """Largest |one - other| / max(|one|, |other|); infinite if only one is finite."""
    largest_step: int
    last: tuple[float, float]
    """Values at the last common step."""


def curve_differences(run: RunRecord, other: RunRecord) -> list[CurveDifference]:
    """Compare the losses and gradient norms in the files of two runs."""
    names = [name for name in (*run.losses, "grad-norm") if name in run.series]
    pairs = [(n, run.series[n], other.series[n]) for n in names if n in other.series]
    return [found for pair in pairs if (found := _difference(*pair)) is not None]


def _difference(name: str, one: Series, other: Series) -> CurveDifference | None:
    values = dict(zip(one.steps, one.values, strict=True))
    others = dict(zip(other.steps, other.values, strict=True))
    steps = sorted(values.keys() & others.keys())
    if not steps:
        return None
    apart = {step: _relative(values[step], others[step]) for step in steps}
    largest = max(steps, key=lambda step: apart[step])
    return CurveDifference(
        name=name,
        num_steps=len(steps),
        first_step=next((step for step in steps if apart[step] > 0), None),
        largest=apart[largest],
        largest_step=largest,
        last=(values[steps[-1]], others[steps[-1]]),
    )


def _relative(one: float, other: float) -> float:
    if one == other or (math.isnan(one) and math.isnan(other)):
        return 0.0
    if not (math.isfinite(one) and math.isfinite(other)):
        return math.inf
    return abs(one - other) / max(abs(one), abs(other))


def comparison_text(run: RunRecord, other: RunRecord, curves: list[CurveDifference]) -> str:
    """Return tables of curves, medians and different settings."""
    names = (run.name, other.name)
    rows = [("curve", "common steps", "first difference", "largest, relative", *names)]
    for each in curves:
        first = "equal" if each.first_step is None else f"step {each.first_step}"
        largest = f"{each.largest:.2e} at step {each.largest_step}" if each.largest else "0"
        last = [f"{value:.6g}" for value in each.last]
        rows.append((each.name, str(each.num_steps), first, largest, *last))
    medians = [("median", *names, "ratio")]
    for name, title, factor in MEDIANS:
        if name in run.series and name in other.series:
            one, two = (record.series[name].median() * factor for record in (run, other))
            medians.append((title, f"{one:.4g}", f"{two:.4g}", f"{two / one:.3f}" if one else ""))
    tables = [_table(rows), _table(medians)]
    if run.settings and other.settings:
        settings = [("setting", *names)]
        for name in dict.fromkeys((*run.settings, *other.settings)):
            one_text, two_text = (r.settings.get(name, "-") for r in (run, other))
            if one_text != two_text:
                flag = all_flags()[name].flag if name in all_flags() else name
                settings.append((flag, one_text, two_text))
        tables.append(_table(settings))
    return "\n\n".join(tables)


def _table(lines: Sequence[tuple[str, ...]]) -> str:
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    shown = ("  ".join(c.ljust(w) for c, w in zip(line, widths, strict=True)) for line in lines)
    return "\n".join(line.rstrip() for line in shown)


@tool
def main(arguments: Sequence[str] | None = None) -> int:
    """Print the comparison; return the exit status."""
    options = read_command_line(Flags, arguments, description=__doc__)
    run, other = read_run(options.run), read_run(options.other)
    curves = curve_differences(run, other)
    print(comparison_text(run, other, curves))
    are_equal = bool(curves) and all(each.first_step is None for each in curves)
    return ExitStatus.DONE if are_equal or not options.check_equal else ExitStatus.FAILED


if __name__ == "__main__":
    sys.exit(main())
