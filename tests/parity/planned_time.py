"""Planned seconds of drawn layouts on this machine, against measured steps of the same run.

    python -m tests.parity.planned_time --layouts 30 --calibration 12 --seed 1

Some drawn layouts calibrate what a unit of work takes here, the others are predicted. Measured and
predicted steps alternate over the whole run, so that what else the machine does disturbs both; the
time of a step is the fastest of several, which it disturbs least.
"""

from __future__ import annotations

import contextlib
import io
import os
import random
import sys
import time
from dataclasses import dataclass

import numpy as np
import torch
import torch.distributed as dist

from megatron.core import parallel_state
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.settings.command_line import read_command_line
from megatron.planner.machine_time import StepWork, fit_machine_time, work_of_step
from megatron.planner.tracing.rank_step import RankUnderTest
from tests.harness.distributed import run_distributed
from tests.harness.resolved_run import run_of
from tests.parity.planned_memory import Layout, drawn
from tests.parity.planned_memory_case import SCRIPT

GOAL = 0.10


@dataclass(frozen=True, kw_only=True)
class Flags:
    """What the command line says."""

    layouts: int = 30
    calibration: int = 12
    steps: int = 12
    rounds: int = 2
    seed: int = 1


def measure(groups: ProcessGroupCollection, words: str, steps: int) -> list[tuple[float, float]]:
    """Train, and return (elapsed, CPU) seconds of each step of this rank after the first two."""
    parallel_state.destroy_model_parallel()
    torch.set_num_threads(1)
    os.environ.update(RANK=str(dist.get_rank()), WORLD_SIZE=str(dist.get_world_size()))
    with contextlib.redirect_stdout(io.StringIO()):
        rank = RankUnderTest(run_of(words, dist.get_world_size()), SCRIPT, None)
    found = []
    for _ in range(steps + 2):
        dist.barrier()
        begin = time.perf_counter(), time.process_time()
        with contextlib.redirect_stdout(io.StringIO()):
            rank.step(None)
        used = time.process_time() - begin[1]
        dist.barrier()
        found.append((time.perf_counter() - begin[0], used))
    return found[2:]


def main() -> int:
    """Calibrate, predict, and print a line for each layout; return whether the goal is met."""
    flags = read_command_line(Flags, description=__doc__)
    layouts = drawn(flags.layouts + flags.calibration, flags.seed)
    elapsed = [float("inf")] * len(layouts)
    used = [float("inf")] * len(layouts)
    for _ in range(flags.rounds):
        for index, layout in enumerate(layouts):
            found = run_distributed(
                measure, layout.world_size, layout.words, flags.steps, timeout_s=300.0
            )
            each = np.array(found)  # [ranks, steps, 2]
            elapsed[index] = min(elapsed[index], each[0, :, 0].min())
            used[index] = min(used[index], each[:, :, 1].sum(axis=0).min())
            print(f"measured {index + 1} of {len(layouts)}", flush=True)
    works = [_work(layout) for layout in layouts]
    chosen = set(random.Random(flags.seed).sample(range(len(layouts)), flags.calibration))
    medians = []
    for name, seconds, counted in (
        ("elapsed", elapsed, [work.shared() for work in works]),
        ("CPU", used, [work.terms.sum(axis=0) for work in works]),
    ):
        machine = fit_machine_time([counted[i] for i in chosen], [seconds[i] for i in chosen])
        print(f"{name} seconds: {machine}")
        errors = []
        for index, (layout, terms) in enumerate(zip(layouts, counted, strict=True)):
            if index in chosen:
                continue
            predicted = machine.seconds(terms)
            low, high = machine.interval(terms)
            errors.append(predicted / seconds[index] - 1)
            print(
                f"{seconds[index]:.4f} measured, {predicted:.4f} predicted ({low:.4f} to"
                f" {high:.4f}), {100 * errors[-1]:+.1f} %: {layout.world_size} {layout.words}"
            )
        sizes = np.abs(errors)
        medians.append(float(np.median(sizes)))
        print(
            f"{name} seconds of {len(errors)} layouts: median error {100 * np.median(sizes):.1f} %,"
            f" mean {100 * sizes.mean():.1f} %, {100 * np.mean(sizes <= GOAL):.0f} % within"
            f" {100 * GOAL:.0f} %; calibrated with {len(chosen)} others\n"
        )
    return int(medians[0] > GOAL)


def _work(layout: Layout) -> StepWork:
    return work_of_step(run_of(layout.words, layout.world_size), SCRIPT, os.cpu_count() or 1)


if __name__ == "__main__":
    sys.exit(main())
