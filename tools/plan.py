"""Predict what training steps cost, in seconds and memory, without running them.

    python tools/plan.py score ROWS.csv --output OUT.csv   # id, seconds of a step, GiB of a rank
    python tools/plan.py evaluate ROWS.csv                 # errors against measured rows
    python tools/plan.py calibrate ROWS.csv                # fit the constants to measured rows

A row says model, batch, GPU and layout; docs/planner.md lists the columns. Empty MBS, VPP and
recompute are filled with the fastest choice that fits. `score` reads no time, rate or memory.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

import numpy as np

REPOSITORY = Path(__file__).resolve().parent.parent
if str(REPOSITORY) not in sys.path:
    sys.path.insert(0, str(REPOSITORY))

from megatron.core.foundation.exit_status import ExitStatus, tool
from megatron.planner.calibrate import fit
from megatron.planner.figures import TITLES, figures
from megatron.planner.hardware import load_hardware, save_constants
from megatron.planner.memory import GIB, predict_memory
from megatron.planner.score import score_rows, write_scores
from megatron.planner.search import fill_blanks, fits
from megatron.planner.validation import (
    cross_validated,
    family_folds,
    family_of,
    measured_rows,
    predict_seconds,
    random_folds,
)
from megatron.planner.workload import read_rows


def parser() -> argparse.ArgumentParser:
    """Return the command line."""
    made = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    commands = made.add_subparsers(dest="command", required=True)
    score = commands.add_parser("score", help="predict the rows of a CSV file")
    score.add_argument("rows", type=Path, metavar="ROWS.csv")
    score.add_argument("--output", type=Path, required=True, metavar="OUT.csv")
    for name, text in (
        ("evaluate", "compare predictions with the column ref_step_s"),
        ("calibrate", "fit the constants to the column ref_step_s and write their files"),
    ):
        command = commands.add_parser(name, help=text)
        command.add_argument("rows", type=Path, metavar="ROWS.csv")
    return made


def score(rows_path: Path, output: Path) -> None:
    """Write a prediction for each row."""
    write_scores(score_rows(read_rows(rows_path), load_hardware()), output)


def evaluate(rows_path: Path) -> None:
    """Print how far predictions are from measured times and memory."""
    rows, hardware = read_rows(rows_path), load_hardware()
    measured = measured_rows(rows)
    families = [family_of(row) for row in rows]
    groups = [row.get("rank_group") or "" for row in rows]
    print(TITLES)
    predictions = {
        "constants as they are": predict_seconds(measured.workloads, hardware),
        "5 folds within families": cross_validated(measured, hardware, random_folds(families)),
        "5 folds of whole families": cross_validated(measured, hardware, family_folds(families)),
    }
    for title, predicted in predictions.items():
        print(figures(predicted, measured.step_s, families, groups).line(title))
    filled = fill_blanks(measured.workloads, hardware)
    print(f"accepted by memory: {100 * np.mean(fits(filled, hardware)):.1f}%")
    known = np.array([bool(row.get("mem_GB_per_gpu")) for row in rows])
    if known.any():
        published = np.array(
            [float(row["mem_GB_per_gpu"]) for row in rows if row["mem_GB_per_gpu"]]
        )
        error = predict_memory(filled.take(known), hardware).total / GIB / published - 1
        print(
            f"memory of {len(error)} rows: median {100 * np.median(abs(error)):.1f}%, "
            f"mean {100 * np.mean(abs(error)):.1f}%"
        )


def calibrate(rows_path: Path) -> None:
    """Fit and save the constants."""
    rows = read_rows(rows_path)
    fitted = fit(measured_rows(rows), load_hardware())
    save_constants(fitted, f"fitted to {len(rows)} measured steps ({rows_path.name})")


@tool
def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command; return the exit status."""
    options = parser().parse_args(arguments)
    if options.command == "score":
        score(options.rows, options.output)
    elif options.command == "evaluate":
        evaluate(options.rows)
    else:
        calibrate(options.rows)
    return ExitStatus.DONE


if __name__ == "__main__":
    sys.exit(main())
