"""Draw the computing and waiting time of each rank over time, from a run with --log-straggler.

    python tools/plot_ranks.py --metrics metrics.jsonl --out ranks.png

A row is a rank; a column is the mean of the steps between two collections of times. Marks show when
a rank was reported as slow.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from megatron.core.foundation import optional_imports
from megatron.core.foundation.errors import DataError
from megatron.core.foundation.exit_status import ExitStatus, tool
from megatron.core.settings.command_line import read_command_line
from megatron.core.settings.flags import flag

PANELS = {
    "compute": ("work",),
    "waiting for other ranks": ("communication", "bubble"),
    "waiting for data": ("data",),
    "waiting for a processor": ("queued",),
}
"""Title -> times that are added up."""


@dataclass(frozen=True, kw_only=True)
class Flags:
    """Files to read and write."""

    metrics: Path = flag(metavar="JSONL")
    """--metrics-jsonl of the run."""
    out: Path = Path("ranks.png")
    """.png, .svg or .pdf."""


def read_times(path: Path) -> list[dict[str, Any]]:
    """Return the lines with times by rank.

    Raises:
        DataError: there is no such file, or no such line in it.
    """
    try:
        lines = [json.loads(line) for line in path.read_text().splitlines()]
    except (OSError, ValueError) as error:
        raise DataError(f"{path} cannot be read: {error}", flags=["--metrics"]) from error
    found = [line for line in lines if "work-s-by-rank" in line]
    # A run that resumed from a checkpoint has some steps twice.
    found = list({line["iteration"]: line for line in found}.values())
    if not found:
        raise DataError(
            f"{path} has no times by rank.",
            rule="a run writes them with --log-straggler and --metrics-jsonl",
            flags=["--metrics"],
            fix="train with both flags",
        )
    num_ranks = len(found[-1]["work-s-by-rank"])
    return [line for line in found if len(line["work-s-by-rank"]) == num_ranks]


def draw(lines: Sequence[dict[str, Any]], out: Path) -> None:
    """Write the picture."""
    purpose = "tools/plot_ranks.py"
    figures = optional_imports.require("matplotlib.figure", purpose=purpose)
    iterations = [line["iteration"] for line in lines]
    num_ranks = len(lines[0]["work-s-by-rank"])
    figure = figures.Figure(figsize=(10, 2.2 * len(PANELS)), layout="constrained")
    for axes, (title, names) in zip(
        figure.subplots(len(PANELS), 1, sharex=True), PANELS.items(), strict=True
    ):
        seconds = sum(np.array([line[f"{name}-s-by-rank"] for line in lines]) for name in names)
        milliseconds = 1000.0 * np.asarray(seconds).T  # [ranks, gatherings]
        mesh = axes.pcolormesh(
            np.arange(len(lines) + 1), np.arange(num_ranks + 1) - 0.5, milliseconds, vmin=0.0
        )
        figure.colorbar(mesh, ax=axes, label="ms of a step")
        axes.set(title=title, ylabel="rank")
        axes.invert_yaxis()
        axes.yaxis.get_major_locator().set_params(integer=True)
    slow = [(i + 0.5, rank) for i, line in enumerate(lines) for rank in line["slow-ranks"]]
    top = figure.axes[0]
    if slow:
        top.plot(*zip(*slow, strict=True), "r.", label="named slow")
        top.legend(loc="upper left")
    ticks = np.unique(np.linspace(0, len(lines) - 1, min(len(lines), 10)).astype(int))
    top.set_xticks(ticks + 0.5, [str(iterations[i]) for i in ticks])
    figure.supxlabel("iteration")
    figure.savefig(out)


@tool
def main(arguments: Sequence[str] | None = None) -> int:
    """Draw; return the exit status."""
    options = read_command_line(Flags, arguments, description=__doc__)
    draw(read_times(options.metrics), options.out)
    print(f"wrote {options.out}")
    return ExitStatus.DONE


if __name__ == "__main__":
    sys.exit(main())
