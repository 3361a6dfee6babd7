"""Run one case and judge it."""

import contextlib
import os
import random
import signal
import time
from pathlib import Path

from tests.faults.checks import (
    References,
    check_message,
    check_newest,
    check_remains,
    check_resume,
    check_save_directory,
)
from tests.faults.job import MODEL, NUM_STEPS, SAVE_INTERVAL, Job
from tests.faults.moments import MissedMomentError, wait_for
from tests.faults.plan import Case, Fault, Moment, Target
from tests.faults.promises import Kept, Promise, promise_for
from tests.faults.result import Result
from tests.harness.machine import ONE_MACHINE

PAUSE_S = 1.0


def words_of(case: Case, folder: Path) -> list[str]:
    """Return the command line of a case, with the sleeps that make its moments long enough."""
    moments = case.moments
    words = [*MODEL.split(), "--train-iters", str(NUM_STEPS), "--save", str(folder / "save")]
    words += ["--save-interval", str(SAVE_INTERVAL), "--load", str(folder / "save")]
    words += ["--metrics-jsonl", str(folder / "metrics"), *case.flags]
    words += ["--num-workers", str(case.workers.value)]
    words += ["--exit-signal-handler"] if case.has_handler else []
    words += ["--async-save"] if Moment.ASYNC_SAVE in moments else []
    if Moment.START in moments:
        words += ["--slow-building", "3"]
    if not case.is_pause:
        # Who goes on training though he should end shall not be at the end before he is seen.
        words += ["--slow-step", "0.1" if case.num_ranks > 1 else "0.05"]
    if Moment.EVALUATION in moments:
        # Longer than torchrun waits after it has passed on a signal: 16 micro batches or more.
        is_asked_to_save = case.has_handler and case.faults[0].target is not Target.WORKER
        words += ["--slow-evaluation", "2.5" if is_asked_to_save else "0.1"]
    return words


def send(job: Job, fault: Fault) -> None:
    """Send the signal; one that stops is followed by one that continues."""
    members = job.members(fault.target)
    if not members:
        raise MissedMomentError(f"there is no {fault.target.value} at {fault.moment.value}")
    send_one = os.killpg if fault.target is Target.GROUP else os.kill
    for member in members:
        with contextlib.suppress(ProcessLookupError):
            send_one(member, fault.signal)


def disturb(job: Job, case: Case, source: random.Random) -> None:
    """Send all signals of a case at their moments."""
    for number, fault in enumerate(case.faults):
        if number and fault.moment is case.faults[number - 1].moment:
            time.sleep(1.0)
        else:
            wait_for(job, fault.moment, source)
        send(job, fault)
        if case.is_pause:
            time.sleep(PAUSE_S)
            send(job, Fault(signal.SIGCONT, fault.target, fault.moment))


def run_case(case: Case, folder: Path, references: References, seed: str) -> Result:
    """Start a job, disturb it, and look at what it leaves."""
    result, began = Result(case.name), time.monotonic()
    source = random.Random(f"{seed} {case.name}")
    folder.mkdir(parents=True)
    if case.moments & {Moment.IMPORT, Moment.START} and not case.is_pause:
        references.copy_of_a_begun_run(case.num_ranks, folder)
    launcher_flags = ONE_MACHINE if case.num_ranks > 1 else None
    job = Job(
        folder / "job",
        words_of(case, folder),
        num_ranks=case.num_ranks,
        launcher_flags=launcher_flags,
    )
    try:
        _disturb_and_check(job, case, folder, references, source, result)
    except MissedMomentError as error:
        result.problems.append(str(error))
    finally:
        job.end()
        result.seconds = time.monotonic() - began
    return result


def _disturb_and_check(
    job: Job,
    case: Case,
    folder: Path,
    references: References,
    source: random.Random,
    result: Result,
) -> None:
    promise: Promise = promise_for(case)
    has_begun = (folder / "metrics").exists()
    disturb(job, case, source)
    sent_at = time.monotonic()
    saved_before = max([*job.saved(), SAVE_INTERVAL * has_begun], default=0)
    left = job.wait_until_gone(promise.within_s)
    result.ended_after_s = time.monotonic() - sent_at
    if left:
        shown = "; ".join(map(str, left))
        result.problems.append(f"after {promise.within_s:g} s there still are: {shown}")
        job.end()
    last_step = max(job.iterations(), default=0)
    save = folder / "save"
    result.problems += check_remains(job, promise)
    result.problems += check_save_directory(save, is_clean=promise.is_clean)
    result.problems += check_message(job, promise)
    result.problems += check_newest(save, promise, saved_before, last_step, NUM_STEPS)
    if last_step == NUM_STEPS and promise.kept is not Kept.END and not case.may_finish:
        result.problems.append("it went on training to the end")
    result.problems += check_resume(folder, references.curve(case.num_ranks), case.num_ranks)
    result.problems += check_save_directory(save, is_clean=True)
    result.facts = f"step {last_step}, saved {saved_before}"
