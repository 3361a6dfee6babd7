"""Send real signals to real runs and check what is left: `python -m tests.faults`.

Campaigns (all of them if none is named):

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
    causes      faults whose first symptom is not their cause, 10 times each
    namespaces  two machines, as network namespaces (needs root, ip, unshare, nsenter)

After each case: the job ends in bounded time; no process, shared memory, port or file is left; the
newest checkpoint is as new as promised (`promises.py`); training continues from it and the whole
curve is that of an undisturbed run, to the bit. Exits with 1 if a case fails, and keeps its files.
"""

import shutil
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from megatron.core.datasets.preprocessing.flags import usable_cores
from megatron.core.settings.command_line import read_command_line
from megatron.core.settings.flags import positional
from tests.faults import causes, hangs, inprocess, mismatches, namespaces, pauses, plan, stragglers
from tests.faults.checks import References
from tests.faults.job import can_have_its_own_shared_memory, take_signals
from tests.faults.restarts import run_restarts, run_shared_rows
from tests.faults.result import Result
from tests.faults.running import run_case
from tests.harness import reaper

Task = tuple[str, Callable[..., Result]]
"""A name, and what runs it in a folder."""


@dataclass(frozen=True, kw_only=True)
class Flags:
    """What the command line says."""

    campaigns: tuple[str, ...] = positional((), metavar="CAMPAIGN", help="All if none is named.")
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
    seed: str = "0"
    """Of the random moments."""
    jobs: int = usable_cores() + 1
    """Runs side by side (%(default)s)."""


def campaigns(arguments: Flags) -> dict[str, Callable[[str], list[Task]]]:
    """Return name -> (seed -> cases), with the cases that the pattern asks for."""

    def of(cases: Sequence[Any], run: Callable[..., Result]) -> Callable[[str], list[Task]]:
        chosen = plan.matching(cases, arguments.cases)
        return lambda seed: [(case.name, partial(run, case, seed=seed)) for case in chosen]

    def numbered(cases: Sequence[Any]) -> Callable[[str], list[Task]]:
        chosen = list(enumerate(plan.matching(cases, arguments.cases)))
        return lambda seed: [(c.name, partial(run_case, c, seed=f"{seed} {i}")) for i, c in chosen]

    def kills(name: str, run: Callable[..., Result], count: int) -> Callable[[str], list[Task]]:
        return lambda seed: [(f"{name}/{count}-kills", partial(run, num_kills=count, seed=seed))]

    return {
        "matrix": numbered(plan.matrix()),
        "preempt": numbered(plan.preempt(arguments.times)),
        "restarts": kills("restarts", run_restarts, arguments.kills),
        "packing": kills("packing", run_shared_rows, arguments.times),
        "inprocess": of(inprocess.cases(arguments.losses), inprocess.run_inprocess),
        "hangs": of(hangs.cases(arguments.random_hangs), hangs.run_hang),
        "mismatches": of(mismatches.cases(arguments.random_mismatches), mismatches.run_mismatch),
        "pauses": of(pauses.CASES, pauses.run_pauses),
        "stragglers": of(
            stragglers.cases(arguments.times),
            lambda case, seed, **places: stragglers.run_straggler(case, **places),  # draws nothing
        ),
        "causes": lambda seed: causes.tasks(min(10, arguments.times), seed, arguments.cases),
        "namespaces": of(namespaces.CASES, namespaces.run_on_two_machines),
    }


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
    known = campaigns(arguments)
    if unknown := set(arguments.campaigns) - set(known):
        print(f"unknown campaigns {sorted(unknown)}; known are {', '.join(known)}", file=sys.stderr)
        return 2
    chosen = arguments.campaigns or tuple(known)
    tasks = [task for name in chosen for task in known[name](f"{arguments.seed} {name}")]
    tasks *= arguments.repeat
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
