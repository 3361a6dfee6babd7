"""Charts over training steps as inline SVG, coloured by the style sheet of the page around them.

No library: a page with many charts stays small, follows the reader's light or dark colours, and
shows the values under the pointer, which pictures of a plotting library do not.
"""

from __future__ import annotations

import html
import json
import math
from collections.abc import Sequence
from dataclasses import dataclass

WIDTH, HEIGHT = 480, 230
LEFT, RIGHT, TOP, BOTTOM = 50, 472, 10, 204
"""The part of a chart in which curves are drawn. The script of the page is told of it."""
_MAX_POINTS = 700
"""Points of a curve beyond which neighbours are joined: more than one a pixel is not seen."""
_NUM_COLOURS = 8
_LOG_SPAN = 30.0
"""Ratio of the largest to the smallest value from which a chart that may be logarithmic is."""


@dataclass(frozen=True, kw_only=True)
class Curve:
    """Values over steps."""

    label: str
    steps: Sequence[float]
    values: Sequence[float]
    colour: int = 0
    style: str = "line"
    """"line", "faint" (the values of which a line is the mean), "dots", or "band"."""
    lower: Sequence[float] = ()
    """Lower edge of a band."""


@dataclass(frozen=True, kw_only=True)
class Chart:
    """One chart: curves with a common axis."""

    title: str
    unit: str
    curves: Sequence[Curve]
    may_be_logarithmic: bool = False
    drops_outliers: bool = False
    """Whether the axis leaves out single steps far from all others, which are counted in words."""
    begins_at_zero: bool = False
    marks: Sequence[float] = ()
    """Steps with a vertical line: where an attempt began."""


@dataclass(frozen=True)
class Axis:
    """The mapping of values to positions."""

    low: float
    high: float
    is_logarithmic: bool = False

    def position(self, value: float, first: float, last: float) -> float:
        """Return where a value is between the positions of the ends of the axis."""
        if self.is_logarithmic:
            share = math.log(max(value, 1e-300) / self.low) / math.log(self.high / self.low)
        else:
            share = (value - self.low) / (self.high - self.low)
        return first + share * (last - first)

    def ticks(self, number: int = 5) -> list[float]:
        """Return about `number` round values on the axis."""
        if self.is_logarithmic:
            first, last = math.floor(math.log10(self.low)), math.ceil(math.log10(self.high))
            every = max(1, round((last - first) / number))
            multiples = (1, 2, 5) if last - first <= 3 else (1,)
            ticks = [m * 10.0**power for power in range(first, last + 1, every) for m in multiples]
            return [tick for tick in ticks if self.low <= tick <= self.high]
        step = _round_step((self.high - self.low) / number)
        first = math.ceil(self.low / step - 1e-9)
        return [k * step for k in range(first, math.floor(self.high / step + 1e-9) + 1)]


def quantity(value: float) -> str:
    """Return a number for people: three or four digits, thousands as k, M, G, T."""
    if not math.isfinite(value):
        return str(value)
    size = abs(value)
    for letter, unit in (("T", 1e12), ("G", 1e9), ("M", 1e6), ("k", 1e3)):
        if size >= unit * (10 if letter == "k" else 1):
            return f"{value / unit:.4g}{letter}"
    if size != 0 and size < 1e-3:
        return f"{value:.3g}"
    return f"{value:,.0f}" if size >= 1000 else f"{value:.4g}"


def figure_html(chart: Chart) -> str:
    """Return a chart as an HTML figure: caption with legend, SVG, and its points as JSON."""
    shown = [_thinned(curve) for curve in chart.curves if len(curve.steps)]
    steps = [step for curve in shown for step in curve.steps] or [0.0]
    across = Axis(min(steps), max(max(steps), min(steps) + 1))
    upward, num_outside = _value_axis(chart, shown)
    legend = "".join(
        f'<li class="{curve.style} c{curve.colour % _NUM_COLOURS}"><i></i>'
        f"{html.escape(curve.label)} <b></b></li>"
        for curve in shown
    )
    note = f" · {num_outside} values outside" if num_outside else ""
    scale = ", logarithmic" if upward.is_logarithmic else ""
    unit = f"<small>{html.escape(chart.unit)}{scale}{note}</small>"
    at_step = '<small class="step"></small>'
    parts = [*_grid(across, upward), *_marks(chart.marks, across)]
    parts += ['<g clip-path="url(#plot)">']
    parts += [_shape(curve, across, upward) for curve in shown]
    parts += ["</g>", f'<line class="pointer" y1="{TOP}" y2="{BOTTOM}" x1="0" x2="0"/>']
    points = {
        "low": across.low,
        "high": across.high,
        "left": LEFT,
        "right": RIGHT,
        "width": WIDTH,
        "curves": [
            {"steps": list(curve.steps), "values": [_digits(v) for v in curve.values]}
            for curve in shown
        ],
    }
    return (
        f'<figure class="chart"><figcaption><h3>{html.escape(chart.title)} {unit}</h3>{at_step}'
        f'<ul class="legend">{legend}</ul></figcaption>'
        f'<svg viewBox="0 0 {WIDTH} {HEIGHT}" role="img" '
        f'aria-label="{html.escape(chart.title)} over steps">{"".join(parts)}</svg>'
        f'<script type="application/json">{json.dumps(points)}</script></figure>'
    )


def _digits(value: float) -> float | None:
    """Return the value as JSON has it: not nan, and no more digits than are shown."""
    return float(f"{value:.6g}") if math.isfinite(value) else None


def _round_step(step: float) -> float:
    power = 10.0 ** math.floor(math.log10(step))
    return next(m * power for m in (1, 2, 2.5, 5, 10) if m * power >= step * 0.999)


def _value_axis(chart: Chart, curves: Sequence[Curve]) -> tuple[Axis, int]:
    """Return the vertical axis, and how many finite values are not on it."""
    values = sorted(v for c in curves for v in (*c.values, *c.lower) if math.isfinite(v))
    if not values:
        return Axis(0.0, 1.0), 0
    low, high = values[0], values[-1]
    if chart.drops_outliers and len(values) >= 20:
        first, last = values[len(values) // 50], values[-1 - len(values) // 50]
        spread = max(last - first, abs(last) * 0.05)
        low, high = max(low, first - spread), min(high, last + spread)
    num_outside = sum(not low <= v <= high for v in values)
    if chart.may_be_logarithmic and low > 0 and high / low > _LOG_SPAN:
        return Axis(low / 1.15, high * 1.15, is_logarithmic=True), num_outside
    if chart.begins_at_zero and low >= 0:
        low = 0.0
    margin = 0.06 * (high - low) or abs(high) * 0.1 or 1.0
    return Axis(low if low == 0.0 else low - margin, high + margin), num_outside


def _grid(across: Axis, upward: Axis) -> list[str]:
    parts = []
    for tick in upward.ticks():
        y = upward.position(tick, BOTTOM, TOP)
        parts.append(f'<line class="grid" x1="{LEFT}" x2="{RIGHT}" y1="{y:.1f}" y2="{y:.1f}"/>')
        parts.append(f'<text class="up" x="{LEFT - 8}" y="{y + 4:.1f}">{quantity(tick)}</text>')
    for tick in across.ticks(7):
        x = across.position(tick, LEFT, RIGHT)
        parts.append(f'<text class="along" x="{x:.1f}" y="{BOTTOM + 18}">{quantity(tick)}</text>')
    return parts


def _marks(steps: Sequence[float], across: Axis) -> list[str]:
    return [
        f'<line class="mark" x1="{x:.1f}" x2="{x:.1f}" y1="{TOP}" y2="{BOTTOM}">'
        f"<title>an attempt begins at step {step:g}</title></line>"
        for step in steps
        if across.low <= step <= across.high
        for x in (across.position(step, LEFT, RIGHT),)
    ]


def _shape(curve: Curve, across: Axis, upward: Axis) -> str:
    def point(step: float, value: float) -> str:
        x, y = across.position(step, LEFT, RIGHT), upward.position(value, BOTTOM, TOP)
        return f"{x:.1f},{min(max(y, -1e4), 1e4):.1f}"

    colour = f"c{curve.colour % _NUM_COLOURS}"
    if curve.style == "band":
        edge = [point(s, v) for s, v in zip(curve.steps, curve.values, strict=True)]
        back = [point(s, v) for s, v in zip(curve.steps, curve.lower, strict=True)]
        return f'<polygon class="band {colour}" points="{" ".join([*edge, *reversed(back)])}"/>'
    runs: list[list[str]] = [[]]
    lost = []
    for step, value in zip(curve.steps, curve.values, strict=True):
        if math.isfinite(value):
            runs[-1].append(point(step, value))
        else:
            runs.append([])
            x = across.position(step, LEFT, RIGHT)
            lost.append(f'<path class="lost" d="M{x - 4:.1f},{TOP}h8l-4,8z"/>')
    if curve.style == "dots":
        drawn = [
            '<circle class="{}" r="3.5" cx="{}" cy="{}"/>'.format(colour, *dot.split(","))
            for run in runs
            for dot in run
        ]
        drawn += [f'<polyline class="thin {colour}" points="{" ".join(run)}"/>' for run in runs]
        return "".join(drawn + lost)
    # A single point between two that are not finite is a dot, not a line without length.
    drawn = [
        f'<polyline class="{curve.style} {colour}" points="{" ".join(run)}"/>'
        for run in (each if each[1:] else each * 2 for each in runs)
        if run
    ]
    return "".join(drawn + lost)


def _thinned(curve: Curve) -> Curve:
    """Keep the least and the greatest of neighbouring values, so that no spike is lost."""
    number = len(curve.steps)
    if number <= _MAX_POINTS:
        return curve
    size = math.ceil(2 * number / _MAX_POINTS)
    kept: list[int] = []
    for begin in range(0, number, size):
        block = range(begin, min(begin + size, number))
        ends = {
            min(block, key=lambda i: _ordered(curve.values[i])),
            max(block, key=lambda i: _ordered(curve.values[i])),
        }
        kept += sorted(ends)
    return Curve(
        label=curve.label,
        steps=[curve.steps[i] for i in kept],
        values=[curve.values[i] for i in kept],
        colour=curve.colour,
        style=curve.style,
        lower=[curve.lower[i] for i in kept] if curve.lower else (),
    )


def _ordered(value: float) -> float:
    """Return a number to order by: what is not finite is the greatest, and so is kept."""
    return value if math.isfinite(value) else math.inf
