"""Predictions for a CSV file of rows: id, seconds of a step, GB of memory."""

from __future__ import annotations

import csv
from collections.abc import Mapping, Sequence
from pathlib import Path

from megatron_lattice.planner.blanks import fill_blanks, fits
from megatron_lattice.planner.memory import GIB, predict_memory
from megatron_lattice.planner.predictor import Predictor
from megatron_lattice.planner.workload import from_rows

COLUMNS = ("id", "predicted_step_s", "predicted_mem_GB", "fits", "low_step_s", "high_step_s")


def score_rows(rows: Sequence[Mapping[str, str]], predictor: Predictor) -> list[dict[str, str]]:
    """Predict each row; a row that does not fit into memory is predicted all the same.

    The memory is in GiB, as tools that watch GPUs print it. Nine of ten measured steps are between
    the low and the high time.
    """
    workloads = fill_blanks(from_rows(rows), predictor.hardware)
    seconds = predictor.seconds(workloads)
    memory = predict_memory(workloads, predictor.hardware).total / GIB
    off = predictor.interval(workloads)
    enough = fits(workloads, predictor.hardware)
    return [
        {
            "id": row.get("id") or str(index + 1),
            "predicted_step_s": f"{seconds[index]:.6g}",
            "predicted_mem_GB": f"{memory[index]:.4g}",
            "fits": "yes" if enough[index] else "no",
            "low_step_s": f"{seconds[index] / off[index]:.6g}",
            "high_step_s": f"{seconds[index] * off[index]:.6g}",
        }
        for index, row in enumerate(rows)
    ]


def write_scores(scores: Sequence[Mapping[str, str]], path: Path) -> None:
    """Write the predictions as CSV."""
    with path.open("w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, COLUMNS, lineterminator="\n")
        writer.writeheader()
        writer.writerows(scores)
