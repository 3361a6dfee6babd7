"""Predict what training steps cost, in seconds and memory, without running them.

    python tools/plan.py score ROWS.csv --output OUT.csv   # id, seconds of a step, GiB of a rank
    python tools/plan.py evaluate ROWS.csv ...             # errors against measured rows
    python tools/plan.py calibrate ROWS.csv ...            # fit the constants to measured rows
    python tools/plan.py search --gpu H100 --num-gpus 64 --preset llama3-8b --bf16 \\
        --seq-length 8192 --global-batch-size 256          # the fastest layout, and its flags

A row says model, batch, GPU and layout; docs/planner.md lists the columns. Empty MBS, VPP and
recompute are filled with the fastest choice that fits. `score` reads no time, rate or memory.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from megatron.core.foundation.exit_status import ExitStatus, tool
from megatron.planner.figures import TITLES, figures
from megatron.planner.hardware import load_hardware, save_constants
from megatron.planner.predictor import fit_predictor, load_predictor
from megatron.planner.score import score_rows, write_scores
from megatron.planner.validation import (
    cross_validated,
    family_folds,
    family_of,
    measured_rows,
    memory_figures,
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
        command.add_argument("rows", type=Path, nargs="+", metavar="ROWS.csv")
    search = commands.add_parser(
        "search", help="find the fastest layout for the flags of pretrain_gpt.py that follow"
    )
    search.add_argument("--gpu", required=True, metavar="KIND", help="A100, H100, H200, B200 ...")
    search.add_argument("--num-gpus", type=int, required=True)
    search.add_argument("--nvlink-domain", type=int, help="GPUs that NVLink joins")
    search.add_argument("--nic-gbytes-per-s", type=float, help="of one GPU, each way")
    return made


def score(rows_path: Path, output: Path) -> None:
    """Write a prediction for each row."""
    write_scores(score_rows(read_rows(rows_path), load_predictor()), output)


def evaluate(paths: Sequence[Path]) -> None:
    """Print how far predictions are from measured times and memory, for each file."""
    tables = [read_rows(path) for path in paths]
    rows, predictor = [row for table in tables for row in table], load_predictor()
    measured = measured_rows(rows)
    families = [family_of(row) for row in rows]
    groups = [row.get("rank_group") or "" for row in rows]
    within = cross_validated(measured, predictor.hardware, random_folds(families))
    whole = cross_validated(measured, predictor.hardware, family_folds(families))
    predictions = {
        "calibrated, model": predictor.modelled_seconds(measured.workloads),
        "calibrated, corrected": predictor.seconds(measured.workloads),
        "5 folds at random, model": within.modelled,
        "5 folds at random, corrected": within.corrected,
        "5 folds of families, model": whole.modelled,
        "5 folds of families, corrected": whole.corrected,
    }
    start = 0
    for path, table in zip(paths, tables, strict=True):
        mine = slice(start, start + len(table))
        start += len(table)
        print(f"{path.name}\n{TITLES}")
        for title, predicted in predictions.items():
            found = figures(predicted[mine], measured.step_s[mine], families[mine], groups[mine])
            print(found.line(title))
    accepted, errors = memory_figures(rows, predictor)
    print(f"accepted by memory: {100 * accepted:.1f}% of {len(rows)} rows")
    if len(errors):
        print(
            f"memory of {len(errors)} rows: median {100 * np.median(errors):.1f}%,"
            f" mean {100 * np.mean(errors):.1f}%"
        )


def calibrate(paths: Sequence[Path]) -> None:
    """Fit and save constants and correction."""
    rows = [row for path in paths for row in read_rows(path)]
    fitted = fit_predictor(measured_rows(rows), load_hardware())
    names = ", ".join(path.name for path in paths)
    save_constants(fitted.hardware, f"fitted to {len(rows)} measured steps ({names})")
    fitted.correction.save()


@tool
def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command; return the exit status."""
    options, flags = parser().parse_known_args(arguments)
    if options.command == "search":
        from megatron.planner.search_command import Cluster, search_command

        cluster = Cluster(
            options.gpu, options.num_gpus, options.nvlink_domain, options.nic_gbytes_per_s
        )
        print(search_command(flags, cluster, script="pretrain_gpt.py"))
        return ExitStatus.DONE
    if flags:
        parser().error(f"unrecognized arguments: {' '.join(flags)}")
    if options.command == "score":
        score(options.rows, options.output)
    elif options.command == "evaluate":
        evaluate(options.rows)
    else:
        calibrate(options.rows)
    return ExitStatus.DONE


if __name__ == "__main__":
    sys.exit(main())
