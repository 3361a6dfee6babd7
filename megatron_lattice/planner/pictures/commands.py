"""What `tools/plan.py` draws with `--pictures DIR`."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np

from megatron_lattice.planner.hardware import rows_hardware
from megatron_lattice.planner.pictures.memory import memory_figure, search_figure
from megatron_lattice.planner.pictures.scaling import scaling_figure
from megatron_lattice.planner.pictures.step import roofline_figure, timeline_figure
from megatron_lattice.planner.pictures.write import write_pictures
from megatron_lattice.planner.predictor import load_predictor
from megatron_lattice.planner.roofline import roofline_of
from megatron_lattice.planner.scaling_command import Curve
from megatron_lattice.planner.search_command import Searched
from megatron_lattice.planner.search_report import layout_text
from megatron_lattice.planner.stage_memory import StageMemory
from megatron_lattice.planner.timeline import timeline_of


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
    write_pictures(directory, "search", figures, title="The fastest layout", text=searched.text)


def draw_memory(stages: Sequence[StageMemory], directory: Path, text: str) -> None:
    """Write the memory of each stage."""
    figures = {"memory": memory_figure(stages)}
    write_pictures(directory, "memory", figures, title="Memory of the stages", text=text)


def draw_scaling(curves: Sequence[Curve], directory: Path, text: str) -> None:
    """Write the curves."""
    figures = {"scaling": scaling_figure(curves)}
    write_pictures(directory, "scaling", figures, title="Scaling", text=text)
