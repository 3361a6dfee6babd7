"""A long run that loses a rank every few minutes, and what its processes hold at the end of it.

The launcher and one rank, which is never chosen, live through all of it: what they leak for each
step, save, evaluation or new generation adds up. The checkpoints that are kept are a fixed number.
"""

from __future__ import annotations

import contextlib
import math
import os
import random
import signal
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import astuple, dataclass
from pathlib import Path

from megatron.training.inprocess.membership import PROCESS
from tests.faults.case_run import CaseRun
from tests.faults.checks import References, check_curve, check_remains, check_save_directory
from tests.faults.inprocess import (
    COME_BACK_S,
    FINISHES,
    LAUNCHER,
    await_that,
    describe,
    generations,
    lose_a_rank,
    members,
    port_of,
)
from tests.faults.job import MODEL, Job
from tests.faults.result import Result

SHARED_FLAGS = (
    "--tensor-model-parallel-size 2 --use-distributed-optimizer --eval-interval 200"
    " --log-interval 10"
)
"""Of the run and of the undisturbed one."""
NUM_RANKS, SAVE_INTERVAL, NUM_KEPT = 4, 100, 2
STEP_S, MEAN_STEP_S = 1.0, 1.3
"""Of a step that nothing disturbs, nearly all of it asleep; and with what losses cost."""
SETTLED, SETTLED_STEPS = 0.25, 3 * SAVE_INTERVAL
"""What a run holds is looked at after this share of it, when all that recurs has been met once."""
MIN_LOOKS = 12
MAX_GROWTH = 1.05
"""Of memory: Python's and libc's heaps breathe by a few percent."""


@dataclass(frozen=True)
class Held:
    """What a process, or the files of the run, came to at one time."""

    memory_mib: float
    descriptors: int
    threads: int
    files: int

    @staticmethod
    def by(pid: int, folder: Path) -> Held:
        """Look at a process and at the folder of the run."""
        place = Path(f"/proc/{pid}")
        status = dict(
            line.split(":", 1)
            for line in (place / "status").read_text().splitlines()
            if ":" in line
        )
        files = sum(len(names) for _, _, names in os.walk(folder))
        memory = int(status["VmRSS"].split()[0]) / 1024
        return Held(memory, len(os.listdir(place / "fd")), int(status["Threads"]), files)


def run_soak(
    *, minutes: float, interval_s: float, folder: Path, references: References, seed: str
) -> Result:
    """Train for so long; every `interval_s` on average, a rank is killed or stopped."""
    source = random.Random(seed)
    # The last step is saved by its number, before the evaluation at the end, in the reference too.
    num_steps = round(minutes * 60 / MEAN_STEP_S / SAVE_INTERVAL) * SAVE_INTERVAL
    settled = max(SETTLED_STEPS, round(SETTLED * num_steps))
    # The last losses are followed by steps: a run that had ended could not lose a rank.
    last_lost = num_steps - round(3 * interval_s / STEP_S)
    shortest_s = settled * MEAN_STEP_S + (MIN_LOOKS + 3) * interval_s * MEAN_STEP_S
    if minutes * 60 < shortest_s:
        raise ValueError(
            f"--minutes {minutes:g} with --interval-s {interval_s:g} is too short to tell growth: "
            f"take {math.ceil(shortest_s / 60)} minutes or lose ranks more often"
        )
    folder.mkdir(parents=True)
    with ThreadPoolExecutor(1) as beside, CaseRun(f"soak/{minutes:g}-minutes") as run:
        # The run is nearly always asleep, so that the undisturbed one goes with it.
        undisturbed = beside.submit(references.curve, NUM_RANKS, num_steps, SHARED_FLAGS)
        words = [*MODEL.split(), *SHARED_FLAGS.split(), "--train-iters", str(num_steps)]
        words += ["--num-workers", "1", "--slow-step", str(STEP_S / 2)]
        words += ["--save", str(folder / "save"), "--load", str(folder / "save")]
        words += ["--save-interval", str(SAVE_INTERVAL), "--most-recent-k", str(NUM_KEPT)]
        words += ["--metrics-jsonl", str(folder / "metrics")]
        job = run.start(
            folder / "job", words, num_ranks=NUM_RANKS, launcher=LAUNCHER,
            launcher_flags=("--spares", "1", "--max-restarts", "100000", *port_of(source)),
        )  # fmt: skip
        await_that(job, lambda: bool(job.iterations()), "waiting for the first steps")
        kept = members(job)[0].environment[PROCESS]
        returned: list[float] = []
        held: dict[str, list[Held]] = {"launcher": [], "rank": []}
        while not job.is_over() and job.iterations()[-1] < last_lost:
            time.sleep(source.uniform(0.5, 1.5) * interval_s)
            if job.iterations()[-1] >= settled:
                note(held, job, kept, folder)
            act = signal.SIGSTOP if len(returned) % 3 == 2 else signal.SIGKILL
            others = [r for r, p in members(job).items() if p.environment[PROCESS] != kept]
            returned.append(lose_a_rank(job, act, source.choice(others)))
        left = job.wait_until_gone(COME_BACK_S + minutes * 60)
        if left or job.process.returncode:
            run.result.problems.append(f"exit status {job.process.returncode}, there: {left}")
        run.result.problems += check_remains(job, FINISHES)
        run.result.problems += check_save_directory(folder / "save", is_clean=True)
        run.result.problems += growth(held)
        run.result.facts = "; ".join(
            [
                f"{len(returned)} ranks lost, {len(generations(job))} generations",
                describe(returned, job),
            ]
            + [f"{name}: {shown(found)}" for name, found in held.items()]
        )
        run.result.problems += check_curve(folder, undisturbed.result(), num_steps)
    return run.result


def note(held: dict[str, list[Held]], job: Job, kept: str, folder: Path) -> None:
    """Add what the launcher and the rank that is kept hold now."""
    pids = {"launcher": job.pid}
    pids["rank"] = next(p.pid for p in members(job).values() if p.environment[PROCESS] == kept)
    for name, pid in pids.items():
        # A save may have removed a directory while the files were counted.
        with contextlib.suppress(OSError):
            held[name].append(Held.by(pid, folder))
            print(f"    {name} {shown(held[name][-1:])}", flush=True)


def growth(held: dict[str, list[Held]]) -> list[str]:
    """Say which figure was higher at the end than after the run had settled."""
    problems = []
    for name, found in held.items():
        if len(found) < MIN_LOOKS:
            problems.append(f"{name}: looked at {len(found)} times, {MIN_LOOKS} are needed")
            continue
        first, last = _windows(found)
        problems += [
            f"{name}: {what} grew from {before:.1f} to {after:.1f}"
            for what, before, after in zip(Held.__annotations__, first, last, strict=True)
            if after > before * (MAX_GROWTH if what == "memory_mib" else 1.0)
        ]
    return problems


def shown(found: Sequence[Held]) -> str:
    """Say the figures after the run had settled, and at its end."""
    names = ("MiB", "descriptors", "threads", "files")
    pairs = zip(names, *_windows(found), strict=True)
    return ", ".join(f"{before:.0f} -> {after:.0f} {name}" for name, before, after in pairs)


def _windows(found: Sequence[Held]) -> tuple[list[float], list[float]]:
    """Return the most of each figure in the first and in the last quarter of the looks."""
    width = max(1, len(found) // 4)
    parts = (found[:width], found[-width:])
    early, late = ([max(c) for c in zip(*map(astuple, p), strict=True)] for p in parts)
    return early, late
