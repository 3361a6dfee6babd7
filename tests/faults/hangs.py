"""Stop a random rank at a random moment, or let it hold the interpreter lock, in every layout.

The watchdog must name the rank and its place in time, and end the job. Where the rank was is known
from two witnesses that have nothing to do with the notes that the watchdog reads: Python's stack,
which `faulthandler` writes, and the steps that the log shows.
"""

import contextlib
import json
import os
import random
import signal
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megatron.core.foundation.failure_file import FAILURE_FILE
from tests.faults.checks import References, check_remains
from tests.faults.job import FATAL, MODEL, POLL_S, TIMEOUT_SCALE, Job
from tests.faults.moments import START_S, MissedMomentError
from tests.faults.places import check_chain, check_place
from tests.faults.planted import HOLD, HOLDERS
from tests.faults.promises import Kept, Promise
from tests.faults.result import CaseRun, Result

STOP = "stop"
"""What is done to the rank: SIGSTOP; otherwise one of its threads holds the interpreter lock."""
HOWS = (STOP, HOLDERS[0], STOP, HOLDERS[1], STOP)
NAMED_WITHIN_S, GONE_WITHIN_S = 10.0, 20.0
FIRST_STEPS, LATER_S = {STOP: 4, HOLDERS[0]: 11, HOLDERS[1]: 11}, 1.5
"""How many steps are done before the moment is drawn, and how much later it is at most. The first
evaluation may hold the interpreter lock as long as it likes."""
ENDED = Promise(Kept.LAST_SAVE, GONE_WITHIN_S, "the watchdog ends the job", is_success=False)

LAYOUTS: dict[str, tuple[int, str]] = {
    # Ranks, flags.
    "tp2": (2, "--tensor-model-parallel-size 2 --sequence-parallel"),
    "pp2": (2, "--pipeline-model-parallel-size 2"),
    "cp2": (2, "--context-parallel-size 2"),
    "ep2": (2, "--num-experts 4 --expert-model-parallel-size 2"),
    "zero1": (2, "--use-distributed-optimizer"),
    "zero3": (2, "--data-parallel-sharding-strategy optim_grads_params"),
    "pp2-interleaved": (
        2,
        "--pipeline-model-parallel-size 2 --num-layers 4 --num-virtual-stages-per-pipeline-rank 2",
    ),
    "pp2-zb-v": (2, "--pipeline-model-parallel-size 2 --num-layers 4 --pipeline-schedule zb-v"),
    "tp2-pp2": (4, "--tensor-model-parallel-size 2 --pipeline-model-parallel-size 2"),
    "cp2-zero1": (4, "--context-parallel-size 2 --use-distributed-optimizer"),
}


@dataclass(frozen=True)
class HangCase:
    """A job, and what happens to one of its ranks."""

    layout: str
    how: str
    number: int
    flags: tuple[str, ...] = ()

    @property
    def name(self) -> str:
        """Say all of it in one word."""
        return f"hangs/{self.layout}/{self.how}/{self.number}"


def cases(times: int) -> list[HangCase]:
    """Return so many cases; all layouts come before one comes again, each time otherwise."""
    found = []
    for number in range(times):
        turn, layout = divmod(number, len(LAYOUTS))
        how = HOWS[(turn + layout) % len(HOWS)]
        found.append(HangCase(list(LAYOUTS)[layout], how, number))
    return found


def words_of(case: HangCase, folder: Path) -> list[str]:
    """Return the flags of its job, which trains until somebody ends it."""
    words = [*MODEL.split(), *LAYOUTS[case.layout][1].split(), "--num-workers", "0"]
    words += ["--train-iters", "1000000", "--save", str(folder / "save"), *case.flags]
    if case.how == STOP:
        return [*words, "--save-interval", "15"]
    # A save may hold the lock, too.
    return [*words, "--save-interval", "1000000", "--hold-lock", case.how]


def run_hang(case: HangCase, folder: Path, references: References, seed: str) -> Result:
    """Start a job, hang one of its ranks, and look at what is said of it."""
    source = random.Random(f"{seed} {case.name}")
    folder.mkdir(parents=True)
    with CaseRun(case.name) as run:
        num_ranks = LAYOUTS[case.layout][0]
        job = run.start(folder / "job", words_of(case, folder), num_ranks=num_ranks)
        wait_for_steps(job, FIRST_STEPS[case.how])
        job.remember_sockets()
        time.sleep(source.uniform(0.0, LATER_S))
        victim = source.randrange(job.num_ranks)
        os.kill(job.ranks()[victim].pid, signal.SIGSTOP if case.how == STOP else HOLD)
        _judge(job, victim, folder, run.result)
    return run.result


def wait_for_steps(job: Job, number: int) -> None:
    """Return when the log shows so many steps.

    Raises:
        MissedMomentError: the job has ended, or does not get there.
    """
    deadline = time.monotonic() + START_S
    while max(job.iterations(), default=0) < number:
        if job.is_over() or time.monotonic() > deadline:
            raise MissedMomentError(f"no step {number}: {job.text()[-1500:]}")
        time.sleep(POLL_S)


def wait_for_verdict(job: Job, within_s: float) -> float | None:
    """Return after how many seconds the log names a cause; None: it does not."""
    began = time.monotonic()
    while (passed := time.monotonic() - began) < within_s * TIMEOUT_SCALE:
        if FATAL.search(job.text()):
            return passed
        time.sleep(POLL_S)
    return None


def read_failure(folder: Path) -> dict[str, Any]:
    """Return what failure.json says; {} without one."""
    with contextlib.suppress(OSError, json.JSONDecodeError):
        found: dict[str, Any] = json.loads((folder / "save" / FAILURE_FILE).read_text())
        return found
    return {}


def check_end(job: Job, began: float, result: Result) -> None:
    """Look whether the job ends in time, with one line and an exit status, and leaves nothing."""
    left = job.wait_until_gone(GONE_WITHIN_S - (time.monotonic() - began))
    result.ended_after_s = time.monotonic() - began
    if left:
        result.problems.append(f"still there: {'; '.join(map(str, left))}")
        job.end()
    if job.process.returncode == 0:
        result.problems.append("exit status 0")
    classes = FATAL.findall(job.text())
    if len(classes) != 1:
        result.problems.append(f"FATAL lines {classes} instead of one")
    result.problems += check_remains(job, ENDED)


def _judge(job: Job, victim: int, folder: Path, result: Result) -> None:
    began = time.monotonic()
    named_after = wait_for_verdict(job, NAMED_WITHIN_S)
    check_end(job, began, result)
    if named_after is None:
        result.problems.append(f"not named within {NAMED_WITHIN_S:g} s: {job.text()[-1500:]}")
        return
    record = read_failure(folder)
    if (record.get("class"), record.get("ranks")) != ("HANG", [victim]):
        result.problems.append(f"rank {victim} hangs, {record.get('message', record)} is said")
        return
    last = max(job.iterations(), default=0)
    result.problems += check_place(record, victim, last) + check_chain(record, victim)
    result.facts = f"rank {victim} after {named_after:.1f} s: {record['where']}"
