"""Memory: of pipeline stages by what it is for, and of the layouts of a search against time."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from megatron.core.foundation.pictures import new_figure
from megatron_lattice.planner.layout_search import SearchResult
from megatron_lattice.planner.memory import GIB
from megatron_lattice.planner.pictures.write import FLAG
from megatron_lattice.planner.search_report import layout_text
from megatron_lattice.planner.stage_memory import StageMemory
from megatron_lattice.planner.tracing.ledger import Kind

_COLOURS = {
    Kind.WEIGHTS: "#4c78be",
    Kind.GRADIENTS: "#399696",
    Kind.OPTIMIZER: "#54a24b",
    Kind.ACTIVATIONS: "#d6a032",
    Kind.COMMUNICATION: "#b4645a",
    Kind.TEMPORARY: "#999999",
}
_MOST_DRAWN = 5000
_SLOWEST = 10.0
"""Times the fastest; slower layouts are left out."""


def search_figure(found: SearchResult, chosen: Sequence[int], capacity_bytes: float) -> Any:
    """Return the layouts that fit, coloured by tensor-parallel size, with the chosen ones named.

    Args:
        chosen: rows of the search, the best first.
        capacity_bytes: of a GPU.
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
        f"{len(found.order)} of {len(found.table)} layouts fit; drawn: {len(rows)} of those up to"
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
        axis.bar(numbers, heights, bottom=bottom, color=_COLOURS[kind], label=kind.value)
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
