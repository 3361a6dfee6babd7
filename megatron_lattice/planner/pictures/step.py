"""A step on a clock, and the roofline of its operators."""

from __future__ import annotations

import math
from typing import Any

from megatron.core.foundation.optional_imports import require
from megatron.core.foundation.pictures import new_figure
from megatron_lattice.planner.pictures.write import FLAG
from megatron_lattice.planner.roofline import Roofline
from megatron_lattice.planner.timeline import Activity, Bar, Timeline

_COLOURS = {
    Activity.FORWARD: "#4c78be",
    Activity.BACKWARD: "#54a24b",
    Activity.COLLECTIVES: "#b4645a",
    Activity.MESSAGE: "#d6a032",
    Activity.GRADIENTS: "#8c5aa0",
    Activity.OPTIMIZER: "#777777",
}
_COMPUTES = (Activity.FORWARD, Activity.BACKWARD, Activity.OPTIMIZER)


def timeline_figure(timeline: Timeline) -> Any:
    """Return a Gantt chart: two lanes for each pipeline rank, compute and communication."""
    figure = new_figure(16, 1.6 + 0.55 * timeline.num_ranks, purpose=FLAG)
    axis = figure.subplots()
    end = max(bar.end for bar in timeline.bars)
    for bar in timeline.bars:
        _draw(axis, bar, end)
    axis.set_xlim(0, end)
    axis.set_ylim(timeline.num_ranks - 0.4, -0.5)
    axis.set_yticks(range(timeline.num_ranks))
    axis.set_yticklabels([f"stage rank {rank}" for rank in range(timeline.num_ranks)])
    axis.set_xlabel("seconds")
    axis.set_title(
        f"{timeline.num_microbatches} micro batches; of each rank, computing above and what it"
        " communicates below",
        fontsize=10,
        loc="left",
    )
    patches = require("matplotlib.patches", purpose=FLAG)
    used = {bar.activity for bar in timeline.bars}
    handles = [
        patches.Patch(color=colour, label=activity.value)
        for activity, colour in _COLOURS.items()
        if activity in used
    ]
    figure.legend(handles=handles, loc="outside upper left", ncols=3)
    return figure


def _draw(axis: Any, bar: Bar, end: float) -> None:
    is_compute = bar.activity in _COMPUTES
    width = max(bar.end - bar.start, 0.0005 * end)
    height, place = (0.5, bar.rank - 0.15) if is_compute else (0.28, bar.rank + 0.27)
    axis.barh(
        place, width, left=bar.start, height=height, color=_COLOURS[bar.activity],
        edgecolor="white" if is_compute else None, linewidth=0.3 if is_compute else 0,
    )  # fmt: skip
    if bar.label and width > 0.007 * len(bar.label) * end:
        middle = bar.start + width / 2
        axis.text(middle, place, bar.label, ha="center", va="center", color="white", fontsize=7)


def roofline_figure(roofline: Roofline, title: str) -> Any:
    """Return operations per second over operations per byte, under what the GPU can do."""
    figure = new_figure(12, 7.5, purpose=FLAG)
    axis = figure.subplots()
    ridge = roofline.peak_flops / roofline.bytes_per_s
    intensities = [point.flops / point.num_bytes for point in roofline.points]
    low, high = min(0.5, *intensities), max(2 * ridge, 1.5 * max(intensities))
    corners = [low, ridge, high]
    axis.plot(
        corners,
        [min(x * roofline.bytes_per_s, roofline.peak_flops) / 1e12 for x in corners],
        color="black",
        label="peak of memory and of products",
    )
    for number, (point, x) in enumerate(zip(roofline.points, intensities, strict=True)):
        colour = f"C{number % 10}"
        rate = point.flops / point.seconds / 1e12
        # Area by time: what counts is large.
        longest = max(each.seconds for each in roofline.points)
        size = 30 + 400 * point.seconds / longest
        label = f"{number + 1}  {point.name}: {_seconds(point.seconds)}, {rate:.0f} TFLOP/s"
        axis.scatter([x], [rate], s=size, color=colour, alpha=0.6, label=label)
        # Products of one size share a place: their numbers stand apart.
        above = 16 + 11 * (number % 4)
        axis.annotate(
            str(number + 1), (x, rate), xytext=(0, above if number % 8 < 4 else -above),
            textcoords="offset points", ha="center", va="center", fontsize=8, color=colour,
            arrowprops={"arrowstyle": "-", "linewidth": 0.4, "color": colour},
        )  # fmt: skip
    axis.set_xscale("log")
    axis.set_yscale("log")
    axis.set_xlabel("operations per byte")
    axis.set_ylabel("TFLOP/s")
    axis.set_title(title, fontsize=10, loc="left")
    axis.grid(visible=True, which="both", alpha=0.2)
    legend = figure.legend(loc="outside right upper", fontsize=8)
    for handle in legend.legend_handles[1:]:
        handle.set_sizes([40])
    return figure


def _seconds(seconds: float) -> str:
    digits = max(0, 2 - math.floor(math.log10(seconds * 1e3)))
    return f"{seconds * 1e3:.{digits}f} ms"
