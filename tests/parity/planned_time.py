"""Planned seconds of drawn layouts on this machine, against measured steps of the same run.

    python -m tests.parity.planned_time --layouts 30 --calibration 12 --seed 1

Some drawn layouts calibrate what a unit of work takes here, the others are predicted. Their steps,
and the operations that predict them, are measured in turns over the whole run, so that what else
the machine does disturbs all of them; the fastest counts, which it disturbs least.
"""

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
from megatron.training.setup.traced_rank import RankUnderTest
from megatron_lattice.planner.machine_time import fit_machine_time, work_of_step
from megatron_lattice.planner.work import OperationTimes, work_of_ranks
from tests.harness.distributed import run_distributed
from tests.harness.resolved_run import run_of
from tests.parity.planned_memory import drawn
from tests.parity.planned_memory_case import SCRIPT

GOAL = 0.10


@dataclass(frozen=True, kw_only=True)
class Flags:
    """What the command line says."""

    layouts: int = 30
    calibration: int = 12
    steps: int = 12
    rounds: int = 3
    seed: int = 1


def measure(groups: ProcessGroupCollection, words: str, steps: int) -> list[float]:
    """Train, and return the seconds of each step of this rank after the first two."""
    parallel_state.destroy_model_parallel()
    torch.set_num_threads(1)
    os.environ.update(RANK=str(dist.get_rank()), WORLD_SIZE=str(dist.get_world_size()))
    with contextlib.redirect_stdout(io.StringIO()):
        rank = RankUnderTest(run_of(words, dist.get_world_size()), SCRIPT, None)
    found = []
    for _ in range(steps + 2):
        dist.barrier()
        begin = time.perf_counter()
        with contextlib.redirect_stdout(io.StringIO()):
            rank.step(None)
        dist.barrier()
        found.append(time.perf_counter() - begin)
    return found[2:]


def main() -> int:
    """Calibrate, predict, and print a line for each layout; return whether the goal is met."""
    flags = read_command_line(Flags, description=__doc__)
    layouts = drawn(flags.layouts + flags.calibration, flags.seed)
    runs = [run_of(layout.words, layout.world_size) for layout in layouts]
    counted = [work_of_ranks(run, SCRIPT) for run in runs]
    torch.set_num_threads(1)
    times, cores = OperationTimes(), os.cpu_count() or 1
    seconds = [float("inf")] * len(layouts)
    for _ in range(flags.rounds):
        times.measure_again()
        works = [
            work_of_step(run, ranks, cores, times) for run, ranks in zip(runs, counted, strict=True)
        ]
        for index, layout in enumerate(layouts):
            found = run_distributed(
                measure, layout.world_size, layout.words, flags.steps, timeout_s=300.0
            )
            seconds[index] = min(seconds[index], *found[0])
            print(f"measured {index + 1} of {len(layouts)}", flush=True)
    chosen = set(random.Random(flags.seed).sample(range(len(layouts)), flags.calibration))
    machine = fit_machine_time([works[i] for i in chosen], [seconds[i] for i in chosen])
    print(machine)
    errors = []
    for index, (layout, work) in enumerate(zip(layouts, works, strict=True)):
        if index in chosen:
            continue
        predicted = machine.seconds(work)
        low, high = machine.interval(work)
        errors.append(predicted / seconds[index] - 1)
        print(
            f"{seconds[index]:.4f} measured, {predicted:.4f} predicted ({low:.4f} to"
            f" {high:.4f}), {100 * errors[-1]:+.1f} %: {layout.world_size} {layout.words}"
        )
    sizes = np.abs(errors)
    print(
        f"{len(errors)} layouts: median error {100 * np.median(sizes):.1f} %,"
        f" mean {100 * sizes.mean():.1f} %, {100 * np.mean(sizes <= GOAL):.0f} % within"
        f" {100 * GOAL:.0f} %; calibrated with {len(chosen)} others"
    )
    return int(np.median(sizes) > GOAL)


if __name__ == "__main__":
    sys.exit(main())
