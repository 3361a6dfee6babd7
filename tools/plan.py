"""Predict what training steps cost, in seconds and memory, without running them.

    python tools/plan.py score ROWS.csv --output OUT.csv   # id, seconds of a step, GiB of a rank
    python tools/plan.py evaluate ROWS.csv ...             # errors against measured rows
    python tools/plan.py calibrate ROWS.csv ...            # fit the constants to measured rows
    python tools/plan.py search --gpu H100 --num-gpus 64 --preset llama3-8b --bf16 \\
        --seq-length 8192 --global-batch-size 256          # the fastest layout, and its flags
    python tools/plan.py step --gpu H100 --num-gpus 64 FLAGS   # one layout, by its parts
    python tools/plan.py memory --num-gpus 64 FLAGS        # each stage, traced from the program
    python tools/plan.py scaling --gpu H100 --output CURVES.csv   # from 8 to 16,384 GPUs

A row describes model, batch, GPU and layout; docs/planner.md lists the columns. Empty MBS, VPP and
recompute are filled with the fastest choice that fits. `score` ignores measured columns.
"""

from __future__ import annotations

import itertools
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from megatron.core.foundation.exit_status import ExitStatus, tool
from megatron.core.settings.command_line import Subcommand, run_subcommand
from megatron.core.settings.flags import flag, positional, unknown_words
from megatron_lattice.planner.figures import TITLES, figures
from megatron_lattice.planner.hardware import load_hardware, save_constants
from megatron_lattice.planner.pictures import prepare_pictures
from megatron_lattice.planner.predictor import (
    fit_predictor,
    load_predictor,
    score_rows,
    write_scores,
)
from megatron_lattice.planner.scaling import ScalingFlags
from megatron_lattice.planner.table_rows import read_rows
from megatron_lattice.planner.validation import (
    choice_figures,
    cross_validated,
    family_of,
    group_names,
    interval_limits,
    layout_names,
    measured_rows,
    memory_figures,
    random_folds,
    source_folds,
)


@dataclass(frozen=True, kw_only=True)
class ScoreFlags:
    """Predict the rows of a CSV file."""

    rows: Path = positional(metavar="ROWS.csv")
    output: Path = flag(metavar="OUT.csv")


@dataclass(frozen=True, kw_only=True)
class EvaluateFlags:
    """Compare predictions with the column ref_step_s."""

    rows: tuple[Path, ...] = positional(metavar="ROWS.csv")


@dataclass(frozen=True, kw_only=True)
class CalibrateFlags:
    """Fit the constants to the column ref_step_s and write their files."""

    rows: tuple[Path, ...] = positional(metavar="ROWS.csv")


@dataclass(frozen=True, kw_only=True)
class SearchFlags:
    """Find the fastest layout for the flags of pretrain_gpt.py that follow."""

    gpu: str = flag(metavar="KIND")
    """A100, H100, H200, B200 ..."""
    num_gpus: int
    nvlink_domain: int | None = None
    """Number of GPUs in an NVLink domain."""
    nic_gbytes_per_s: float | None = None
    """Bandwidth of one GPU in each direction."""
    calibrate: tuple[Path, ...] = flag((), metavar="RUN")
    """Directories of runs that were measured on this cluster, each with --metrics-jsonl and
    --save in it."""
    pictures: Path | None = flag(None, metavar="DIR")
    """Write search.png, step.png and roofline.png."""
    free_layout: bool = False
    """Search the sizes that a file of the run fixes, too."""
    details: bool = False
    """Print the parts of the step, and why other layouts lost."""
    flags_of_training: tuple[str, ...] = unknown_words()


@dataclass(frozen=True, kw_only=True)
class StepFlags:
    """Predict a step of the flags of pretrain_gpt.py that follow."""

    gpu: str | None = flag(None, metavar="KIND")
    """A100, H100, H200, B200 ...; by default gloo on this machine, calibrated by --calibrate."""
    num_gpus: int
    """Ranks."""
    nvlink_domain: int | None = None
    """Number of GPUs in an NVLink domain."""
    nic_gbytes_per_s: float | None = None
    """Bandwidth of one GPU in each direction."""
    calibrate: tuple[Path, ...] = flag((), metavar="RUN")
    """Directories of runs that were measured there, each with --metrics-jsonl and --save in it."""
    flags_of_training: tuple[str, ...] = unknown_words()


@dataclass(frozen=True, kw_only=True)
class MemoryFlags:
    """Trace the memory of each pipeline stage for the flags of pretrain_gpt.py that follow."""

    num_gpus: int
    pictures: Path | None = flag(None, metavar="DIR")
    """Write memory.png."""
    flags_of_training: tuple[str, ...] = unknown_words()


def score(flags: ScoreFlags) -> int:
    """Write a prediction for each row."""
    write_scores(score_rows(read_rows(flags.rows), load_predictor()), flags.output)
    return ExitStatus.DONE


def evaluate(flags: EvaluateFlags) -> int:
    """Print the errors against measured times and memory, for each file and kind of model."""
    tables = [read_rows(path) for path in flags.rows]
    rows, predictor = [row for table in tables for row in table], load_predictor()
    measured = measured_rows(rows)
    families = np.array([family_of(row) for row in rows])
    groups, layouts = np.array(group_names(rows)), np.array(layout_names(rows))
    within = cross_validated(measured, predictor.hardware, random_folds(families.tolist()))
    whole = cross_validated(measured, predictor.hardware, source_folds(rows))
    predictions = {
        "calibrated, model": (predictor.modelled_seconds(measured.workloads), None),
        "calibrated": (
            predictor.seconds(measured.workloads), predictor.interval(measured.workloads)
        ),
        "folds at random, model": (within.modelled, None),
        "folds at random": (within.corrected, within.interval),
        "folds of sources, model": (whole.modelled, None),
        "folds of sources": (whole.corrected, whole.interval),
    }  # fmt: skip
    of_file = np.repeat(np.arange(len(tables)), [len(table) for table in tables])
    kinds = {"dense": ~measured.workloads.is_moe, "experts": measured.workloads.is_moe}
    for number, path in enumerate(flags.rows):
        print(f"{path.name}\n{TITLES}")
        for (title, (predicted, off)), (kind, is_kind) in itertools.product(
            predictions.items(), kinds.items()
        ):
            mine = np.flatnonzero((of_file == number) & is_kind)
            if not len(mine):
                continue
            found = figures(
                predicted[mine], measured.step_s[mine], families[mine].tolist(),
                groups[mine].tolist(), layouts[mine].tolist(), None if off is None else off[mine],
            )  # fmt: skip
            print(found.line(f"{title}, {kind}"))
    print(choice_figures(rows, predictor).line())
    accepted, errors = memory_figures(rows, predictor)
    print(f"accepted by memory: {100 * accepted:.1f}% of {len(rows)} rows")
    if len(errors):
        print(
            f"memory of {len(errors)} rows: median {100 * np.median(errors):.1f}%,"
            f" mean {100 * np.mean(errors):.1f}%"
        )
    return ExitStatus.DONE


def calibrate(flags: CalibrateFlags) -> int:
    """Fit and save constants and correction."""
    rows = [row for path in flags.rows for row in read_rows(path)]
    measured, hardware = measured_rows(rows), load_hardware()
    folds = source_folds(rows), random_folds([family_of(row) for row in rows])
    limits = interval_limits(measured, [cross_validated(measured, hardware, f) for f in folds])
    fitted = fit_predictor(measured, hardware.with_constants(limits))
    names = ", ".join(path.name for path in flags.rows)
    save_constants(fitted.hardware, f"fitted to {len(rows)} measured steps ({names})")
    fitted.correction.save()
    return ExitStatus.DONE


def search(flags: SearchFlags) -> int:
    """Print the fastest layouts, and the command line of the fastest."""
    from megatron_lattice.planner.search_command import Cluster, search_command

    prepare_pictures(flags.pictures)
    cluster = Cluster(
        flags.gpu, flags.num_gpus, flags.nvlink_domain, flags.nic_gbytes_per_s, flags.calibrate
    )
    searched = search_command(
        flags.flags_of_training,
        cluster,
        script="pretrain_gpt.py",
        has_free_layout=flags.free_layout,
        has_details=flags.details,
    )
    print(searched.text)
    if flags.pictures is not None:
        from megatron_lattice.planner.pictures import draw_search

        draw_search(searched, flags.pictures)
    return ExitStatus.DONE


def step(flags: StepFlags) -> int:
    """Print the seconds of a step, its parts, and the memory of a rank."""
    import pretrain_gpt
    from megatron.training.setup.traced_rank import ModelScript
    from megatron_lattice.planner.search_command import Cluster
    from megatron_lattice.planner.step_command import step_text

    script = ModelScript(pretrain_gpt.model_provider, pretrain_gpt.forward_step)
    cluster = None
    if flags.gpu is not None:
        cluster = Cluster(flags.gpu, flags.num_gpus, flags.nvlink_domain, flags.nic_gbytes_per_s)
    words = flags.flags_of_training
    print(step_text(words, cluster, flags.num_gpus, script, flags.calibrate))
    return ExitStatus.DONE


def memory(flags: MemoryFlags) -> int:
    """Print the memory of each pipeline stage."""
    import pretrain_gpt
    from megatron.training.setup.traced_memory import memory_of_stages, memory_table
    from megatron.training.setup.traced_rank import ModelScript
    from megatron_lattice.planner.search_command import run_of_words

    prepare_pictures(flags.pictures)
    run = run_of_words(flags.flags_of_training, flags.num_gpus)
    script = ModelScript(pretrain_gpt.model_provider, pretrain_gpt.forward_step)
    stages = memory_of_stages(run, script)
    table = memory_table(stages)
    print(table)
    if flags.pictures is not None:
        from megatron_lattice.planner.pictures import draw_memory

        draw_memory(stages, flags.pictures)
    return ExitStatus.DONE


def scaling(flags: ScalingFlags) -> int:
    """Print strong and weak scaling, and the cost of a training."""
    from megatron_lattice.planner.scaling_command import (
        scaling_curves,
        scaling_rows,
        scaling_text,
        write_rows,
    )

    prepare_pictures(flags.pictures)
    curves = scaling_curves(flags)
    text = scaling_text(curves, flags)
    print(text)
    if flags.output is not None:
        write_rows(scaling_rows(curves), flags.output)
    if flags.pictures is not None:
        from megatron_lattice.planner.pictures import draw_scaling

        draw_scaling(curves, flags.pictures)
    return ExitStatus.DONE


COMMANDS: Mapping[str, Subcommand[Any]] = {
    "score": Subcommand(ScoreFlags, score),
    "evaluate": Subcommand(EvaluateFlags, evaluate),
    "calibrate": Subcommand(CalibrateFlags, calibrate),
    "search": Subcommand(SearchFlags, search),
    "step": Subcommand(StepFlags, step),
    "memory": Subcommand(MemoryFlags, memory),
    "scaling": Subcommand(ScalingFlags, scaling),
}


@tool
def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command; return the exit status."""
    return run_subcommand(COMMANDS, arguments, description=__doc__)


if __name__ == "__main__":
    sys.exit(main())
