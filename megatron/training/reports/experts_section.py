"""The load of experts over steps and layers."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping

from megatron.training.reports.line_chart import Chart, Curve
from megatron.training.reports.page import card_html
from megatron.training.reports.run_charts import charts_html, restarts
from megatron.training.reports.run_record import RunRecord, Series

_LOAD = re.compile(r"experts/layer (?P<layer>\d+) (?P<kind>lowest|median|highest) load$")
_WIDTH = 1200
_MAX_CELLS = 160
"""Columns of a heat map; each is the greatest value of its steps."""


def experts_html(run: RunRecord) -> str:
    """Return the charts of some layers and the heat map of all; nothing without experts."""
    loads = expert_loads(run)
    rows = {layer: kinds["highest"] for layer, kinds in loads.items() if "highest" in kinds}
    if not rows:
        return ""
    note = (
        "The highest load of an expert over the steps: the darker, the farther above the even one."
    )
    picture = card_html(f'<p class="note">{note}</p>', heat_map_svg(rows))
    return charts_html(expert_charts(run)) + picture


def expert_loads(run: RunRecord) -> dict[int, dict[str, Series]]:
    """Return layer -> lowest, median, highest load of its experts, in multiples of the even one."""
    loads: dict[int, dict[str, Series]] = {}
    for name, series in run.series.items():
        if found := _LOAD.match(name):
            loads.setdefault(int(found["layer"]), {})[found["kind"]] = series
    return dict(sorted(loads.items()))


def expert_charts(run: RunRecord, max_layers: int = 4) -> list[Chart]:
    """Return the load of the experts of some layers over the steps: lowest to highest."""
    loads = expert_loads(run)
    every = max(1, math.ceil(len(loads) / max_layers))
    return [
        Chart(
            title=f"Load of the experts of layer {layer}",
            unit="tokens, in multiples of the even share",
            begins_at_zero=True,
            marks=restarts([run]),
            curves=[
                Curve(
                    label="lowest to highest", style="band", steps=kinds["highest"].steps,
                    values=kinds["highest"].values, lower=kinds["lowest"].values, colour=1,
                ),
                Curve(label="median", steps=kinds["median"].steps, values=kinds["median"].values,
                      colour=1),
            ],
        )
        for layer, kinds in list(loads.items())[::every]
        if len(kinds) == 3
    ]  # fmt: skip


def heat_map_svg(rows: Mapping[int, Series], *, even: float = 1.0) -> str:
    """Draw values over steps, a row for each layer: the darker, the farther above `even`."""
    steps = sorted({step for series in rows.values() for step in series.steps})
    if not steps:
        return ""
    size = max(1, math.ceil(len(steps) / _MAX_CELLS))
    columns = [steps[i : i + size] for i in range(0, len(steps), size)]
    width, height = (_WIDTH - 90) / len(columns), 18
    top = max([*(v for series in rows.values() for v in series.finite()), even * 1.01])
    parts = []
    for row, (layer, series) in enumerate(rows.items()):
        of_step = dict(zip(series.steps, series.values, strict=True))
        parts.append(f'<text x="4" y="{row * height + 13}">layer {layer}</text>')
        for column, block in enumerate(columns):
            value = max((of_step[s] for s in block if s in of_step), default=math.nan)
            if math.isfinite(value):
                share = max(0.0, min(1.0, (value - even) / (top - even)))
                parts.append(
                    f'<rect x="{80 + column * width:.1f}" y="{row * height}" '
                    f'width="{width + 0.4:.1f}" height="{height - 2}" opacity="{share:.2f}">'
                    f"<title>layer {layer}, step {block[0]}: {value:.2f}</title></rect>"
                )
    bottom = len(rows) * height + 16
    parts.append(f'<text x="80" y="{bottom}">step {steps[0]}</text>')
    parts.append(f'<text x="{_WIDTH - 10}" y="{bottom}" text-anchor="end">step {steps[-1]}</text>')
    return (
        f'<svg class="heat" viewBox="0 0 {_WIDTH} {bottom + 6}" role="img" '
        f'aria-label="highest load by layer">{"".join(parts)}</svg>'
    )
