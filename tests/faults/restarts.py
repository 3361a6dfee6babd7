"""Kill ranks of one job again and again, which torchrun --max-restarts starts again."""

import os
import random
import signal
import statistics
import time
from collections.abc import Callable
from pathlib import Path

from tests.faults.checks import References, check_curve, check_remains, check_save_directory
from tests.faults.job import FATAL, POLL_S, SHARED_ROWS, TIMEOUT_SCALE, Job, model_words
from tests.faults.processes import Process
from tests.faults.promises import Kept, Promise
from tests.faults.result import Result
from tests.harness.machine import ONE_MACHINE
from tests.parity.shared_rows_case import write_conversations

SAVE_INTERVAL = 2
COME_BACK_S = 120.0 * TIMEOUT_SCALE
"""How long a new attempt may take until its first step, on a crowded machine."""
FINISHES = Promise(Kept.END, COME_BACK_S, "every attempt continues from the newest checkpoint")


def num_steps_for(num_kills: int) -> int:
    """Return more steps than attempts that are killed within a second of their first can do."""
    return 20 * (num_kills + 1)


class _Gone(Exception):
    """The job does not come back, or is over."""


def _await(what: Callable[[], bool], job: Job, doing: str) -> None:
    deadline = time.monotonic() + COME_BACK_S
    while not what():
        if job.is_over():
            raise _Gone(f"the job ended with {job.process.returncode} while {doing}")
        if time.monotonic() > deadline:
            raise _Gone(f"nothing for {COME_BACK_S:g} s while {doing}")
        time.sleep(POLL_S)


def _attempt(process: Process) -> int:
    return int(process.environment.get("TORCHELASTIC_RESTART_COUNT", "0"))


def kill_again_and_again(job: Job, num_kills: int, source: random.Random) -> list[float]:
    """Kill a random rank in each attempt, half of them while it starts.

    Returns:
        for each kill after which the next attempt did a step before its own, how long that took.
    """
    returns: list[float] = []
    last_killed, killed_at = -1, 0.0
    for number in range(num_kills):

        def ranks(last: int = last_killed) -> dict[int, Process]:
            return {rank: p for rank, p in job.ranks().items() if _attempt(p) > last}

        def has_come_back(ranks: Callable[[], dict[int, Process]] = ranks) -> bool:
            return len(ranks()) == job.num_ranks

        printed = len(job.iterations())
        _await(has_come_back, job, f"waiting for the ranks after kill {number}")
        if source.random() < 0.5:
            time.sleep(source.uniform(0.0, 5.0))
        else:
            _await(lambda n=printed: len(job.iterations()) > n, job, f"waiting for a step {number}")
            if number:
                returns.append(time.monotonic() - killed_at)
            time.sleep(source.uniform(0.0, 1.0))
        alive = ranks()
        if not alive:
            raise _Gone(f"all ranks had ended before kill {number + 1}")
        victim = alive[source.choice(sorted(alive))]
        last_killed, killed_at = _attempt(victim), time.monotonic()
        os.kill(victim.pid, signal.SIGKILL)
    return returns


def run_shared_rows(folder: Path, references: References, num_kills: int, seed: str) -> Result:
    """Run a job on conversations whose rows ranks share through all kills to its end."""
    corpus = references.folder / "conversations"
    corpus.mkdir()
    prefix = write_conversations(corpus, 200, longest=16)
    flags = f"{SHARED_ROWS} --data-path {prefix}"
    return run_restarts(folder, references, num_kills, seed, flags=flags, name="packing")


def run_restarts(
    folder: Path,
    references: References,
    num_kills: int,
    seed: str,
    *,
    flags: str = "",
    name: str = "restarts",
) -> Result:
    """Run a job through all kills to its end, and compare it with an undisturbed one.

    Args:
        flags: of the model and its data, beside those of all jobs.
    """
    result, began = Result(f"{name}/{num_kills}-kills"), time.monotonic()
    num_steps = num_steps_for(num_kills)
    folder.mkdir(parents=True)
    words = [*model_words(flags), "--train-iters", str(num_steps), "--num-workers", "2"]
    words += ["--save-interval", str(SAVE_INTERVAL), "--most-recent-k", "4"]
    words += ["--save", str(folder / "save"), "--load", str(folder / "save")]
    words += ["--metrics-jsonl", str(folder / "metrics"), "--slow-step", "0.02"]
    launcher_flags = (*ONE_MACHINE, "--max-restarts", "100")
    job = Job(folder / "job", words, num_ranks=2, launcher_flags=launcher_flags)
    try:
        returns = kill_again_and_again(job, num_kills, random.Random(seed))
        last_kill = time.monotonic()
        left = job.wait_until_gone(120.0 + 0.5 * num_steps)
        result.ended_after_s = time.monotonic() - last_kill
        if left or job.process.returncode:
            result.problems.append(f"exit status {job.process.returncode}, still there: {left}")
        else:
            result.problems += check_remains(job, FINISHES)
            result.problems += check_save_directory(folder / "save", is_clean=True)
            reference = references.curve(2, num_steps, flags)
            result.problems += check_curve(folder, reference, num_steps)
        if returns:
            result.facts = (
                f"first step after a kill: median {statistics.median(returns):.1f} s, "
                f"longest {max(returns):.1f} s; {len(FATAL.findall(job.text()))} FATAL lines"
            )
    except _Gone as error:
        result.problems.append(str(error))
    finally:
        job.end()
        result.seconds = time.monotonic() - began
    return result
