"""Two runs side by side: settings, curves to the bit, speed and memory."""

from __future__ import annotations

import html
import math
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime

from megatron.training.reports.page import card_html, page_html, section_html, table_html
from megatron.training.reports.run_charts import (
    GRAD_NORM,
    MEMORY,
    THROUGHPUT,
    TOKEN_RATE,
    charts_html,
    curve_charts,
    speed_charts,
)
from megatron.training.reports.run_record import RunRecord, Series
from megatron.training.reports.scalar_files import STEP_TIME
from megatron.training.reports.settings_table import SettingRow, differences


@dataclass(frozen=True)
class CurveDifference:
    """How far a scalar of two runs is apart, over the steps that both have."""

    name: str
    num_steps: int
    first_step: int | None
    """The first one at which the values are not equal; None if all are."""
    largest: float
    """Largest difference relative to the larger of the two values."""
    largest_step: int
    last: tuple[float, float]
    """Values at the last step that both have."""


@dataclass(frozen=True)
class Comparison:
    """What two runs have in common, and what not."""

    names: tuple[str, str]
    curves: list[CurveDifference]
    settings: list[SettingRow]
    medians: list[tuple[str, float, float]]
    """What, and its median over the steps of each run."""

    @property
    def curves_are_equal(self) -> bool:
        """Whether there are common steps, and all losses and gradient norms are equal in them."""
        return bool(self.curves) and all(each.first_step is None for each in self.curves)


def compare_runs(run: RunRecord, other: RunRecord) -> Comparison:
    """Compare losses, gradient norms, settings, speed and memory.

    Values are compared as they were written: all digits in `--metrics-jsonl`, fp32 in TensorBoard.
    """
    curves = []
    for name in dict.fromkeys((*run.losses, GRAD_NORM)):
        if name in run.series and name in other.series:
            found = _curve_difference(name, run.series[name], other.series[name])
            curves += [found] if found is not None else []
    medians = [
        (what, run.series[name].median() * scale, other.series[name].median() * scale)
        for name, what, scale in (
            (STEP_TIME, "time of a step (ms)", 1e3),
            (TOKEN_RATE, "tokens/s per device", 1.0),
            (THROUGHPUT, "TFLOP/s per device", 1.0),
            (MEMORY, "peak memory (GiB)", 2.0**-30),
        )
        if name in run.series and name in other.series
    ]
    settings = differences(run.settings, other.settings) if run.settings and other.settings else []
    return Comparison((run.name, other.name), curves, settings, medians)


def _curve_difference(name: str, one: Series, other: Series) -> CurveDifference | None:
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
    """Return the difference relative to the larger value; infinite beside what is not finite."""
    if one == other or (math.isnan(one) and math.isnan(other)):
        return 0.0
    if not (math.isfinite(one) and math.isfinite(other)):
        return math.inf
    return abs(one - other) / max(abs(one), abs(other))


def comparison_rows(found: Comparison) -> list[tuple[str, ...]]:
    """Return a row for each curve: name, common steps, first difference, largest, last values."""
    return [
        (
            each.name,
            f"{each.num_steps:,}",
            "equal" if each.first_step is None else f"step {each.first_step:,}",
            "0" if not each.largest else f"{each.largest:.2e} at step {each.largest_step:,}",
            f"{each.last[0]:.6g}",
            f"{each.last[1]:.6g}",
        )
        for each in found.curves
    ]


def comparison_head(found: Comparison) -> tuple[str, ...]:
    """Return the titles of these rows."""
    one, other = found.names
    return "curve", "common steps", "first difference", "largest, relative", one, other


def comparison_text(found: Comparison) -> str:
    """Return the comparison as tables of text."""
    parts = [_text_table(comparison_head(found), comparison_rows(found))]
    parts.append(_text_table(("median", *found.names, "ratio"), _median_rows(found)))
    settings = [(row.flag, row.value, row.other) for row in found.settings]
    parts.append(
        _text_table(("setting", *found.names), settings) if settings else "no setting differs"
    )
    return "\n\n".join(parts)


def comparison_page(run: RunRecord, other: RunRecord) -> str:
    """Return the comparison as one page of HTML, with the curves of both runs."""
    found = compare_runs(run, other)
    title = f"{run.name} and {other.name}"
    equal = "curves equal" if found.curves_are_equal else "curves differ"
    kind = "good" if found.curves_are_equal else "warn"
    settings = [(row.flag, row.value, row.other) for row in found.settings]
    return page_html(
        title=f"{title}: comparison of two training runs",
        header=f'<h1>{html.escape(title)}</h1><span class="status {kind}">{equal}</span>',
        sections=[
            section_html(
                "Differences",
                card_html(table_html(comparison_head(found), comparison_rows(found))),
                card_html(table_html(("median", *found.names, "ratio"), _median_rows(found))),
            ),
            section_html("Curves", charts_html(curve_charts([run, other]))),
            section_html("Speed and memory", charts_html(speed_charts([run, other]))),
            section_html(
                "Settings that differ",
                card_html(table_html(("setting", *found.names), settings)),
            ),
        ],
        footer=f"Made by tools/compare.py on {datetime.now():%Y-%m-%d %H:%M}.",
    )


def _median_rows(found: Comparison) -> list[tuple[str, ...]]:
    return [
        (what, f"{one:.4g}", f"{other:.4g}", f"{other / one:.3f}" if one else "")
        for what, one, other in found.medians
    ]


def _text_table(head: tuple[str, ...], rows: Sequence[tuple[str, ...]]) -> str:
    lines = [head, *rows]
    widths = [max(len(line[column]) for line in lines) for column in range(len(head))]
    shown = ("  ".join(c.ljust(w) for c, w in zip(line, widths, strict=True)) for line in lines)
    return "\n".join(line.rstrip() for line in shown)
