"""Pictures of predictions, `tools/plan.py --pictures DIR`: a search, memory of stages, a step on a
clock, the roofline of its operators, scaling."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from megatron.core.foundation.optional_imports import require
from megatron.core.foundation.pictures import new_figure
from megatron.training.metrics.memory_timeline import Kind
from megatron.training.setup.traced_memory import StageMemory
from megatron_lattice.planner.hardware import rows_hardware
from megatron_lattice.planner.layout_search import SearchResult
from megatron_lattice.planner.memory import GIB
from megatron_lattice.planner.predictor import load_predictor
from megatron_lattice.planner.roofline import Roofline, roofline_of
from megatron_lattice.planner.scaling import Scaling
from megatron_lattice.planner.scaling_command import Curve
from megatron_lattice.planner.search_command import Searched
from megatron_lattice.planner.search_report import layout_text
from megatron_lattice.planner.timeline import Activity, Bar, Timeline, timeline_of

FLAG = "--pictures"


def prepare_pictures(directory: Path | None) -> None:
    """Make the directory, if there is one, before anything is computed.

    Raises:
        MissingExtraError: matplotlib is not installed.
    """
    if directory is not None:
        require("matplotlib", purpose=FLAG)
        directory.mkdir(parents=True, exist_ok=True)


def _save(figures: Mapping[str, Any], directory: Path) -> None:
    """Write `NAME.png` for each figure of matplotlib."""
    for name, figure in figures.items():
        figure.savefig(directory / f"{name}.png", dpi=120)


def draw_search(searched: Searched, directory: Path) -> None:
    """Write the search as a scatter, and the chosen layout's step and operators."""
    hardware = load_predictor().hardware
    row = searched.found.table.take(np.array([searched.chosen[0]]))
    capacity = float(rows_hardware(row, hardware).memory_bytes[0])
    name = layout_text(row, 0)
    figures = {
        "search": search_figure(searched.found, searched.chosen, capacity),
        "step": timeline_figure(timeline_of(row, hardware)),
        "roofline": roofline_figure(
            roofline_of(row, hardware), f"one micro batch of a layer on {row.gpu[0]}: {name}"
        ),
    }
    _save(figures, directory)


def draw_memory(stages: Sequence[StageMemory], directory: Path) -> None:
    """Write the memory of each stage."""
    _save({"memory": memory_figure(stages)}, directory)


def draw_scaling(curves: Sequence[Curve], directory: Path) -> None:
    """Write the curves."""
    _save({"scaling": scaling_figure(curves)}, directory)


_KIND_COLOURS = {
    Kind.WEIGHTS: "#4c78be",
    Kind.GRADIENTS: "#399696",
    Kind.OPTIMIZER: "#54a24b",
    Kind.ACTIVATIONS: "#d6a032",
    Kind.COMMUNICATION: "#b4645a",
    Kind.TEMPORARY: "#999999",
}
_MOST_DRAWN = 5000
_SLOWEST = 10.0
"""Layouts slower than this many times the fastest are left out."""


def search_figure(found: SearchResult, chosen: Sequence[int], capacity_bytes: float) -> Any:
    """Return the layouts that fit, coloured by tensor-parallel size, with the chosen ones named.

    Args:
        chosen: rows of the search, the best first.
        capacity_bytes: memory of a GPU.
    """
    figure = new_figure(12, 7.5, purpose=FLAG)
    axis = figure.subplots()
    best = found.seconds[found.order[0]]
    rows = found.order[found.seconds[found.order] <= _SLOWEST * best]
    if len(rows) > _MOST_DRAWN:
        kept = np.random.default_rng(0).choice(len(rows), _MOST_DRAWN, replace=False)
        rows = rows[np.sort(kept)]
    for size in np.unique(found.table.tensor_size[rows]):
        mine = rows[found.table.tensor_size[rows] == size]
        axis.scatter(
            found.seconds[mine], found.memory[mine] / GIB, s=9, alpha=0.5,
            label=f"tensor {size:.0f}",
        )  # fmt: skip
    for place, row in enumerate(chosen):
        name = f"{place + 1}: {layout_text(found.table, row)}"
        axis.scatter(
            [found.seconds[row]], [found.memory[row] / GIB], s=160 if place == 0 else 70,
            marker="*" if place == 0 else "D", edgecolor="black", color="gold", label=name,
            zorder=3,
        )  # fmt: skip
    axis.axhline(capacity_bytes / GIB, color="black", linestyle="--", linewidth=1)
    axis.text(best, capacity_bytes / GIB, " memory of a GPU", va="bottom")
    axis.set_xscale("log")
    for formatter in (axis.xaxis.set_major_formatter, axis.xaxis.set_minor_formatter):
        formatter(lambda seconds, _: f"{seconds:g}")
    axis.set_xlabel("seconds of a step")
    axis.set_ylabel("GiB of a GPU")
    axis.set_ylim(bottom=0)
    axis.set_title(
        f"{len(found.order)} of {len(found.table)} layouts fit; drawn: {len(rows)} layouts up to"
        f" {_SLOWEST:g} times the fastest",
        fontsize=10,
        loc="left",
    )
    axis.grid(visible=True, alpha=0.2)
    figure.legend(loc="outside lower left", ncols=2, fontsize=8)
    return figure


def memory_figure(stages: Sequence[StageMemory]) -> Any:
    """Return a figure with one bar for each stage."""
    figure = new_figure(max(6.0, 2.5 + 0.6 * len(stages)), 5.5, purpose=FLAG)
    axis = figure.subplots()
    numbers = [stage.stage for stage in stages]
    bottom = [0.0] * len(stages)
    for kind in Kind:
        heights = [stage.kinds[kind] / GIB for stage in stages]
        axis.bar(numbers, heights, bottom=bottom, color=_KIND_COLOURS[kind], label=kind.value)
        bottom = [low + height for low, height in zip(bottom, heights, strict=True)]
    for number, height in zip(numbers, bottom, strict=True):
        axis.text(number, height, f"{height:.1f}", ha="center", va="bottom", fontsize=8)
    axis.set_xticks(numbers)
    axis.set_xlabel("pipeline stage")
    axis.set_ylabel("GiB at the peak")
    axis.set_ylim(top=1.08 * max(bottom))
    handles, labels = axis.get_legend_handles_labels()
    figure.legend(handles[::-1], labels[::-1], loc="outside right upper")
    return figure


_ACTIVITY_COLOURS = {
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
        f"{timeline.num_microbatches} micro batches; upper lane of a rank: compute, lower lane:"
        " communication",
        fontsize=10,
        loc="left",
    )
    patches = require("matplotlib.patches", purpose=FLAG)
    used = {bar.activity for bar in timeline.bars}
    handles = [
        patches.Patch(color=colour, label=activity.value)
        for activity, colour in _ACTIVITY_COLOURS.items()
        if activity in used
    ]
    figure.legend(handles=handles, loc="outside upper left", ncols=3)
    return figure


def _draw(axis: Any, bar: Bar, end: float) -> None:
    is_compute = bar.activity in _COMPUTES
    width = max(bar.end - bar.start, 0.0005 * end)
    height, place = (0.5, bar.rank - 0.15) if is_compute else (0.28, bar.rank + 0.27)
    axis.barh(
        place, width, left=bar.start, height=height, color=_ACTIVITY_COLOURS[bar.activity],
        edgecolor="white" if is_compute else None, linewidth=0.3 if is_compute else 0,
    )  # fmt: skip
    if bar.label and width > 0.007 * len(bar.label) * end:
        middle = bar.start + width / 2
        axis.text(middle, place, bar.label, ha="center", va="center", color="white", fontsize=7)


def roofline_figure(roofline: Roofline, title: str) -> Any:
    """Return operations per second over operations per byte, under the GPU's roofline."""
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
        # The area of a point grows with its time.
        longest = max(each.seconds for each in roofline.points)
        size = 30 + 400 * point.seconds / longest
        label = f"{number + 1}  {point.name}: {_seconds(point.seconds)}, {rate:.0f} TFLOP/s"
        axis.scatter([x], [rate], s=size, color=colour, alpha=0.6, label=label)
        # Products of one size have the same coordinates: separate their numbers.
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


def scaling_figure(curves: Sequence[Curve]) -> Any:
    """Return a figure with six panels; each panel has one line per model."""
    figure = new_figure(14, 12, purpose=FLAG)
    axes = figure.subplots(3, 2)
    strong = [curve for curve in curves if curve.points[0].scaling is Scaling.STRONG]
    weak = [curve for curve in curves if curve.points[0].scaling is Scaling.WEAK]
    _panel(
        axes[0, 0], strong, lambda c: [p.tokens_per_s for p in c.points],
        "strong scaling: tokens per second (dashed: linear)", is_log=True, has_ideal=True,
    )  # fmt: skip
    _panel(
        axes[0, 1], weak, lambda c: [p.tokens_per_s for p in c.points],
        "weak scaling: tokens per second (dashed: linear)", is_log=True, has_ideal=True,
    )  # fmt: skip
    for axis, some, name in ((axes[1, 0], strong, "strong"), (axes[1, 1], weak, "weak")):
        _panel(
            axis, some, lambda c: [100 * p.mfu for p in c.points],
            f"{name} scaling: MFU in %, causal attention, 16-bit peak",
        )  # fmt: skip
        axis.set_ylim(bottom=0)
    _panel(
        axes[2, 0], strong, lambda c: [cost.days for cost in c.costs],
        "strong scaling: days of the training, failures included", is_log=True,
    )  # fmt: skip
    _panel(
        axes[2, 1], strong, lambda c: [cost.kwh / 1000 for cost in c.costs],
        "strong scaling: energy of the training in MWh", is_log=True,
    )  # fmt: skip
    names = axes[0, 0].get_legend_handles_labels()
    figure.legend(*names, loc="outside upper center", ncols=min(len(curves), 9))
    return figure


def _panel(
    axis: Any,
    curves: Sequence[Curve],
    values: Callable[[Curve], list[float]],
    title: str,
    *,
    is_log: bool = False,
    has_ideal: bool = False,
) -> None:
    for curve in curves:
        counts, heights = [point.num_gpus for point in curve.points], values(curve)
        (line,) = axis.plot(counts, heights, marker="o", label=curve.points[0].model)
        if has_ideal:
            ideal = [heights[0] * count / counts[0] for count in counts]
            axis.plot(counts, ideal, linestyle="--", linewidth=0.8, color=line.get_color())
    axis.set_xscale("log", base=2)
    axis.xaxis.set_major_formatter(lambda count, _: f"{count:,.0f}")
    if is_log:
        axis.set_yscale("log")
    axis.set_title(title, fontsize=11, loc="left")
    axis.set_xlabel("GPUs")
    axis.grid(visible=True, alpha=0.3)
