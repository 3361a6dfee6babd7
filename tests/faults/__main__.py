"""Send real signals to real runs and check what is left: `python -m tests.faults`.

Campaigns (all of them but the soak without a name):

    matrix      each signal at each moment to each target, with and without loader workers
    preempt     SIGTERM to torchrun with default flags saves the last finished step, 20 times
    restarts    30 kills of random ranks at random times under torchrun --max-restarts
    packing     20 kills of a run whose samples share rows, which ranks split as they need
    inprocess   ranks lost one after another while the others go on in their processes; replicas
                that become fewer and more
    hangs       a stopped rank, or one that holds the interpreter lock, in 50 random places
    mismatches  one rank leaves a collective out, or takes another size or operation
    pauses      2,000 steps with long evaluations and saves, and ranks stopped for 5 s: no alarm
    stragglers  a rank that computes 1.3 times as long, which --log-straggler names; clean runs
    unattended  100 failures of seven kinds in one run of two machines, which restarts by itself
    causes      faults whose first symptom is not their cause, 10 times each
    namespaces  two machines, as network namespaces (needs root, ip, unshare, nsenter)
    soak        hours of a run that loses a rank every few minutes: nothing that it holds grows

After each case: the job ends in bounded time; no process, shared memory, port or file is left; the
newest checkpoint is as new as promised (`promises.py`); training continues from it and the whole
curve is that of an undisturbed run, to the bit. Exits with 1 if a case fails, and keeps its files.
"""

from __future__ import annotations

import shutil
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from megatron.core.datasets.preprocessing.flags import usable_cores
from megatron.core.settings.command_line import read_command_line
from megatron.core.settings.flags import positional
from tests.faults import causes, hangs, inprocess, mismatches, namespaces, pauses, plan, stragglers
from tests.faults.checks import References
from tests.faults.job import can_have_its_own_shared_memory, take_signals
from tests.faults.restarts import run_restarts, run_shared_rows
from tests.faults.result import Result
from tests.faults.running import run_case
from tests.faults.soak import run_soak
from tests.faults.unattended import run_unattended
from tests.harness import reaper

Task = tuple[str, Callable[..., Result]]
"""A name, and what runs it in a folder."""


UNNAMED = (
    "matrix", "preempt", "restarts", "packing", "inprocess", "hangs", "mismatches", "pauses",
    "stragglers", "unattended", "causes", "namespaces",
)  # fmt: skip
"""Those that run where none is named."""
CAMPAIGNS = (*UNNAMED, "soak")


@dataclass(frozen=True, kw_only=True)
class Flags:
    """What the command line says."""

    campaigns: tuple[str, ...] = positional((), metavar="CAMPAIGN", help=", ".join(CAMPAIGNS))
    cases: str = ""
    """Only cases whose name has these words; | between alternatives."""
    list: bool = False
    """Print the cases, run none."""
    repeat: int = 1
    """Run everything so many times."""
    times: int = 20
    """Of preempt and packing; of stragglers as many slow as clean runs."""
    kills: int = 30
    """Of restarts."""
    losses: int = 10
    """Of each layout of inprocess."""
    random_hangs: int = 50
    """Of hangs."""
    random_mismatches: int = 20
    """Of mismatches."""
    failures: int = 100
    """Of unattended."""
    minutes: float = 180.0
    """Of the soak."""
    interval_s: float = 180.0
    """Of the soak: seconds between two failures, on average."""
    seed: str = "0"
    """Of the random moments."""
    jobs: int = usable_cores() + 1
    """Runs side by side (%(default)s)."""


def tasks_of(campaign: str, arguments: Flags) -> list[Task]:
    """Return the cases of a campaign that the pattern asks for."""
    tasks: list[Task] = []
    base = f"{arguments.seed} {campaign}"
    if campaign in ("matrix", "preempt"):
        cases = plan.matrix() if campaign == "matrix" else plan.preempt(arguments.times)
        for number, case in enumerate(plan.matching(cases, arguments.cases)):
            tasks.append((case.name, partial(run_case, case, seed=f"{base} {number}")))
    if campaign == "restarts":
        count = arguments.kills
        run = partial(run_restarts, num_kills=count, seed=base)
        tasks.append((f"restarts/{count}-kills", run))
    if campaign == "packing":
        run = partial(run_shared_rows, num_kills=arguments.times, seed=base)
        tasks.append((f"packing/{arguments.times}-kills", run))
    if campaign == "inprocess":
        for lossy in plan.matching(inprocess.cases(arguments.losses), arguments.cases):
            tasks.append((lossy.name, partial(inprocess.run_inprocess, lossy, seed=base)))
    if campaign == "hangs":
        for hang in plan.matching(hangs.cases(arguments.random_hangs), arguments.cases):
            tasks.append((hang.name, partial(hangs.run_hang, hang, seed=base)))
    if campaign == "mismatches":
        drawn = mismatches.cases(arguments.random_mismatches)
        for case in plan.matching(drawn, arguments.cases):
            tasks.append((case.name, partial(mismatches.run_mismatch, case, seed=base)))
    if campaign == "pauses":
        for paused in plan.matching(pauses.CASES, arguments.cases):
            tasks.append((paused.name, partial(pauses.run_pauses, paused, seed=base)))
    if campaign == "stragglers":
        for straggler in plan.matching(stragglers.cases(arguments.times), arguments.cases):
            tasks.append((straggler.name, partial(stragglers.run_straggler, straggler)))
    if campaign == "unattended":
        failures = arguments.failures
        run = partial(run_unattended, num_failures=failures, seed=base)
        tasks.append((f"unattended/{failures}-failures", run))
    if campaign == "causes":
        tasks += causes.tasks(min(10, arguments.times), base, arguments.cases)
    if campaign == "soak":
        run = partial(
            run_soak, minutes=arguments.minutes, interval_s=arguments.interval_s, seed=base
        )
        tasks.append((f"soak/{arguments.minutes:g}-minutes", run))
    if campaign == "namespaces":
        for case in plan.matching(namespaces.CASES, arguments.cases):
            tasks.append((case.name, partial(namespaces.run_on_two_machines, case, seed=base)))
    return tasks * arguments.repeat


def run_all(tasks: list[Task], num_jobs: int, folder: Path) -> list[Result]:
    """Run tasks side by side and print a line for each; folders of failures stay."""
    references, done = References(folder), []

    def run_one(numbered: tuple[int, Task]) -> Result:
        number, (name, run) = numbered
        place = folder / f"{number:03d}"
        try:
            result = run(folder=place, references=references)
        except Exception as error:
            result = Result(name, [f"{type(error).__name__}: {error}"])
        after = "" if result.ended_after_s is None else f"{result.ended_after_s:.1f}"
        print(
            f"{result.name:<66}{result.outcome:<9}{after:>8}{result.seconds:>8.1f}  {result.facts}",
            flush=True,
        )
        for problem in result.problems:
            print(f"    {problem}", flush=True)
        if result.problems and place.exists():
            print(f"    kept: {place}", flush=True)
        else:
            shutil.rmtree(place, ignore_errors=True)
        return result

    print(f"{'case':<66}{'':<9}{'end (s)':>8}{'all (s)':>8}", flush=True)
    with ThreadPoolExecutor(num_jobs) as pool:
        done = list(pool.map(run_one, enumerate(tasks)))
    return done


def main() -> int:
    """Run what is asked for."""
    arguments = read_command_line(Flags, prog="python -m tests.faults", description=__doc__)
    if unknown := set(arguments.campaigns) - set(CAMPAIGNS):
        known = ", ".join(CAMPAIGNS)
        print(f"unknown campaigns {sorted(unknown)}; known are {known}", file=sys.stderr)
        return 2
    tasks = [t for name in arguments.campaigns or UNNAMED for t in tasks_of(name, arguments)]
    if arguments.list:
        print("\n".join(name for name, _ in tasks))
        return 0
    reaper.start(keeps_files=True)  # of a case that fails
    take_signals()
    if not can_have_its_own_shared_memory():
        print("without root and unshare what is left in /dev/shm is not seen", flush=True)
    began = time.monotonic()
    folder = Path(tempfile.mkdtemp(prefix="faults-"))
    results = run_all(tasks, arguments.jobs, folder)
    outcomes = Counter(result.outcome for result in results)
    shown = ", ".join(f"{count} {outcome}" for outcome, count in outcomes.items())
    print(f"{len(results)} cases in {time.monotonic() - began:.0f} s: {shown}")
    for reason in dict.fromkeys(result.not_run for result in results if result.not_run):
        print(f"not run: {reason}")
    if not outcomes["FAILED"]:
        shutil.rmtree(folder, ignore_errors=True)
    return int(outcomes["FAILED"] > 0)


if __name__ == "__main__":
    sys.exit(main())
