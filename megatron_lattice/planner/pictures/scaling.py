"""Scaling curves: throughput, use of the GPUs, duration and energy, time lost to failures."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from megatron.core.foundation.pictures import new_figure
from megatron_lattice.planner.pictures.write import FLAG
from megatron_lattice.planner.scaling import Scaling
from megatron_lattice.planner.scaling_command import Curve


def scaling_figure(curves: Sequence[Curve]) -> Any:
    """Return a figure with six panels, in each of which a line is a model."""
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
