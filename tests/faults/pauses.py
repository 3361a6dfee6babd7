"""What is slow but not stuck: long evaluations and saves, and ranks that are stopped for 5 seconds.

The watchdog must say nothing in 2,000 steps over four layouts, and the jobs must reach their ends.
"""

import os
import random
import re
import signal
import time
from dataclasses import dataclass
from pathlib import Path

from tests.faults.checks import References, check_remains
from tests.faults.hangs import LAYOUTS, wait_for_steps
from tests.faults.job import FATAL, MODEL
from tests.faults.moments import START_S
from tests.faults.promises import Kept, Promise
from tests.faults.result import CaseRun, Result

NUM_STEPS, NUM_PAUSES, PAUSE_S, LONG_S = 500, 5, 5.0, 9.0
INTERVAL = 200
"""Steps between evaluations, and between saves."""
ALARM = re.compile(r"^WARNING: rank \d+ has made no progress.*$", re.MULTILINE)
FINISHES = Promise(Kept.END, 300.0, "nothing is stuck", is_success=True, is_clean=True)


@dataclass(frozen=True)
class PausesCase:
    """A job of a layout with everything that may take long."""

    layout: str

    @property
    def name(self) -> str:
        """Say all of it in one word."""
        return f"pauses/{self.layout}"


CASES = tuple(PausesCase(layout) for layout in ("tp2", "pp2", "ep2", "zero1"))


def run_pauses(case: PausesCase, folder: Path, references: References, seed: str) -> Result:
    """Train to the end with pauses at random moments, and count what the watchdog says."""
    source = random.Random(f"{seed} {case.name}")
    folder.mkdir(parents=True)
    num_ranks, layout = LAYOUTS[case.layout]
    words = [*MODEL.split(), *layout.split(), "--num-workers", "0", "--train-iters", str(NUM_STEPS)]
    words += ["--save", str(folder / "save"), "--save-interval", str(INTERVAL)]
    words += ["--eval-interval", str(INTERVAL), "--long-evaluation", str(LONG_S)]
    words += ["--long-save", str(LONG_S)]
    with CaseRun(case.name) as run:
        job = run.start(folder / "job", words, num_ranks=num_ranks)
        for step in sorted(source.sample(range(10, NUM_STEPS - 50), NUM_PAUSES)):
            wait_for_steps(job, step)
            victim = job.ranks()[source.randrange(num_ranks)].pid
            os.kill(victim, signal.SIGSTOP)
            time.sleep(PAUSE_S)
            os.kill(victim, signal.SIGCONT)
        left, problems = job.wait_until_gone(START_S), run.result.problems
        alarms = FATAL.findall(job.text()) + ALARM.findall(job.text())
        problems += [f"alarm: {alarm}" for alarm in alarms]
        if left or job.process.returncode or max(job.iterations(), default=0) != NUM_STEPS:
            problems.append(f"it did not get to its end: {job.text()[-1500:]}")
        problems += check_remains(job, FINISHES)
        run.result.facts = (
            f"{NUM_STEPS} steps, {NUM_PAUSES} pauses of {PAUSE_S:g} s,"
            f" {job.text().count('for long')} evaluations and saves of {LONG_S:g} s,"
            f" {len(alarms)} alarms"
        )
    return run.result
