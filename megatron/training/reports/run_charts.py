"""Which charts there are of a run, or of several runs over each other."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence

from megatron.training.reports.line_chart import Chart, Curve, figure_html
from megatron.training.reports.run_record import RunRecord, Series
from megatron.training.reports.scalar_files import STEP_TIME

GRAD_NORM, LEARNING_RATE, TOKEN_RATE = "grad-norm", "learning-rate", "tokens-per-second-per-device"
THROUGHPUT, MEMORY = "throughput", "mem-max-allocated-bytes"
_SHARE = "-share"
_EVALUATION = re.compile(r"(?P<loss>.+) (?:validation|test)(?P<of> .+)?$")
_OTHERS = (
    ("loss-scale", "Loss scale", "", True),
    ("batch-size", "Global batch size", "samples", False),
    ("params-norm", "Norm of the weights", "", False),
    ("max-attention-logit", "Largest attention logit", "", False),
    ("num-zeros", "Zeros among the gradients", "elements", False),
)
"""Scalars with a chart where they are not the same at all steps: name, title, unit, logarithmic."""


def running_mean(values: Sequence[float], weight: float = 0.9) -> list[float]:
    """Return the exponentially weighted mean up to each value, of the finite ones alone."""
    means, total, weights = [], 0.0, 0.0
    for value in values:
        if math.isfinite(value):
            total, weights = weight * total + value, weight * weights + 1.0
        means.append(total / weights if weights else math.nan)
    return means


def curve_charts(runs: Sequence[RunRecord]) -> list[Chart]:
    """Return losses, gradient norm, learning rate, and what else changes over the steps."""
    charts = [_loss_chart(name, runs) for name in _loss_names(runs)]
    for name, title, unit, is_log in (
        (GRAD_NORM, "Gradient norm", "before clipping", True),
        (LEARNING_RATE, "Learning rate", "", False),
    ):
        charts += _chart_of(name, title, unit, runs, may_be_logarithmic=is_log)
    for name, title, unit, is_log in _OTHERS:
        if any(len(set(run.series[name].values)) > 1 for run in runs if name in run.series):
            charts += _chart_of(name, title, unit, runs, may_be_logarithmic=is_log)
    return charts


def speed_charts(runs: Sequence[RunRecord]) -> list[Chart]:
    """Return throughput, time of a step, memory, and what the time went into."""
    charts: list[Chart] = []
    for name, title, unit, scale in (
        (TOKEN_RATE, "Throughput", "tokens/s per device", 1.0),
        (STEP_TIME, "Time of a step", "ms", 1e3),
        (MEMORY, "Peak memory", "GiB on the last rank", 2.0**-30),
    ):
        charts += _chart_of(
            name, title, unit, runs, scale=scale, drops_outliers=name != MEMORY,
            begins_at_zero=True, is_noisy=name != MEMORY,
        )  # fmt: skip
    return [*charts, *(_share_chart(run, runs) for run in runs if _share_names(run))]


def charts_html(charts: list[Chart]) -> str:
    """Return charts side by side; nothing if there are none."""
    inside = "\n".join(figure_html(chart) for chart in charts)
    return f'<div class="charts">{inside}</div>' if inside else ""


def evaluations_of(loss: str, run: RunRecord) -> dict[str, Series]:
    """Return "validation" or "test" and the name of the set -> what evaluations say of a loss."""
    return {
        name.removeprefix(f"{loss} "): series
        for name, series in run.series.items()
        if (found := _EVALUATION.match(name)) and found["loss"] == loss and not _is_perplexity(name)
    }


def _is_perplexity(name: str) -> bool:
    return name.endswith(" ppl")


def _loss_names(runs: Sequence[RunRecord]) -> list[str]:
    """Return the losses of training steps; the evaluations belong to their charts."""
    names = dict.fromkeys(name for run in runs for name in run.losses)
    return [n for n in names if not _EVALUATION.match(n) and not n.startswith("experts/")]


def _loss_chart(name: str, runs: Sequence[RunRecord]) -> Chart:
    curves: list[Curve] = []
    for index, run in enumerate(runs):
        label = f"{run.name}: " if len(runs) > 1 else ""
        colour = 2 * index
        if name in run.series:
            curves += _noisy(run.series[name], label, colour)
        curves += [
            Curve(label=f"{label}{kind}", steps=series.steps, values=series.values,
                  style="dots", colour=number if len(runs) == 1 else colour)
            for number, (kind, series) in enumerate(evaluations_of(name, run).items(), 1)
        ]  # fmt: skip
    unit = "nats per token" if name == "lm loss" else ""
    title = name[0].upper() + name[1:]
    return Chart(title=title.replace("Lm ", "LM "), unit=unit, curves=curves, marks=restarts(runs))


def _chart_of(
    name: str,
    title: str,
    unit: str,
    runs: Sequence[RunRecord],
    *,
    scale: float = 1.0,
    may_be_logarithmic: bool = False,
    drops_outliers: bool = False,
    begins_at_zero: bool = False,
    is_noisy: bool = False,
) -> list[Chart]:
    """Return the chart of one scalar; none if no run has it."""
    curves: list[Curve] = []
    for index, run in enumerate(runs):
        if name not in run.series:
            continue
        series = run.series[name]
        scaled = Series(series.steps, [value * scale for value in series.values])
        label = f"{run.name}: " if len(runs) > 1 else ""
        if is_noisy or name == GRAD_NORM:
            curves += _noisy(scaled, label, 2 * index)
        else:
            curves.append(Curve(label=run.name if label else title.lower(), steps=scaled.steps,
                                values=scaled.values, colour=2 * index))  # fmt: skip
    if not curves:
        return []
    return [
        Chart(
            title=title, unit=unit, curves=curves, marks=restarts(runs),
            may_be_logarithmic=may_be_logarithmic, drops_outliers=drops_outliers,
            begins_at_zero=begins_at_zero,
        )
    ]  # fmt: skip


def _noisy(series: Series, label: str, colour: int) -> list[Curve]:
    """Return each step, and the running mean."""
    mean = running_mean(series.values)
    return [
        Curve(label=f"{label}each step", steps=series.steps, values=series.values,
              style="faint", colour=colour),
        Curve(label=f"{label}running mean", steps=series.steps, values=mean, colour=colour),
    ]  # fmt: skip


def _share_names(run: RunRecord) -> list[str]:
    return [name for name in run.series if name.endswith(_SHARE)]


def _share_chart(run: RunRecord, runs: Sequence[RunRecord]) -> Chart:
    """Stack the shares of what the time of a step went into."""
    names = _share_names(run)
    steps = run.series[names[0]].steps
    below = [0.0] * len(steps)
    curves = []
    for colour, name in enumerate(names):
        of_step: Mapping[float, float] = dict(
            zip(run.series[name].steps, run.series[name].values, strict=True)
        )
        above = [b + 100.0 * of_step.get(s, 0.0) for b, s in zip(below, steps, strict=True)]
        label = name.removesuffix(_SHARE).replace("-", " ")
        curves.append(Curve(label=label, steps=steps, values=above, lower=below, style="band",
                            colour=colour))  # fmt: skip
        below = above
    title = "Share of the time" + (f" of {run.name}" if len(runs) > 1 else "")
    return Chart(title=title, unit="%, stacked", curves=curves, begins_at_zero=True)


def restarts(runs: Sequence[RunRecord]) -> list[float]:
    """Return where attempts after the first begin; of several runs none, as nobody could tell."""
    return [attempt.first_step for attempt in runs[0].attempts[1:]] if len(runs) == 1 else []
