"""Wait for a moment of a job, as it can be told from outside."""

import random
import time
from collections.abc import Callable

from tests.faults.job import NUM_STEPS, POLL_S, TIMEOUT_SCALE, Job
from tests.faults.plan import Moment
from tests.faults.slow_pretrain import BUILDING, EVALUATING

START_S = 120.0 * TIMEOUT_SCALE
"""How long a job may take from its start to a moment."""


class MissedMomentError(Exception):
    """The job ended, or went on, without the moment."""


def _is_importing(job: Job) -> bool:
    ranks = job.ranks()
    return len(ranks) == job.num_ranks and ranks[0].has_mapped("libtorch_cpu")


def _has_reached(step: int) -> Callable[[Job], bool]:
    return lambda job: max(job.iterations(), default=0) >= step


def _is_saving(job: Job) -> bool:
    return any((job.folder.parent / "save").glob("iter_*.tmp-*"))


def _has_said(text: str) -> Callable[[Job], bool]:
    return lambda job: text in job.text()


MOMENTS: dict[Moment, tuple[Callable[[Job], bool], float]] = {
    # How it is recognised; how many seconds later at most the signal is sent.
    Moment.IMPORT: (_is_importing, 0.5),
    Moment.START: (_has_said(BUILDING), 1.0),
    Moment.STEP: (_has_reached(7), 0.3),
    Moment.EVALUATION: (_has_said(EVALUATING), 0.1),
    Moment.SAVE: (_is_saving, 0.02),
    Moment.ASYNC_SAVE: (_is_saving, 0.02),
    Moment.EXIT: (_has_said("[after training is done]"), 1.0),
}
SHORT = (Moment.SAVE, Moment.ASYNC_SAVE)
"""Moments that last milliseconds."""


def wait_for(job: Job, moment: Moment, source: random.Random) -> None:
    """Return at a random time of the moment.

    Raises:
        MissedMomentError: the job has ended.
    """
    is_now, later_s = MOMENTS[moment]
    deadline = time.monotonic() + START_S
    while not is_now(job):
        if job.is_over() or time.monotonic() > deadline:
            raise MissedMomentError(f"the run ended before its {moment.value}, or is stuck")
        has_begun = moment in SHORT and max(job.iterations(), default=0) % NUM_STEPS > 2
        time.sleep(0.0005 if has_begun else POLL_S)
    job.remember_sockets() if moment not in SHORT else None
    time.sleep(source.uniform(0.0, later_s))
