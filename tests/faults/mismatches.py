"""Change one collective of one rank, at random: leave it out, take another size or operation.

The watchdog must name both sides: the rank, one of its peers, and the call of each.
"""

import random
import re
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.faults.checks import References
from tests.faults.hangs import (
    LAYOUTS,
    check_end,
    read_failure,
    wait_for_verdict,
)
from tests.faults.job import MODEL, POLL_S, Job
from tests.faults.moments import START_S, MissedMomentError
from tests.faults.planted import KINDS, PLANTED
from tests.faults.result import CaseRun, Result

NAMED_WITHIN_S = 20.0
MOST_CALLS = 60
"""Up to how many collectives are let through after the first steps."""
LAYOUT_NAMES = tuple(name for name in LAYOUTS if name != "pp2-zb-v")
"""Those that have collectives of more than a number or two."""
_PLANTED = re.compile(PLANTED + r"(.+) for (\w+ of \d+), (\d+) on (\S+)")
_SIDE = re.compile(
    r"rank (\d+)(?: is in|:[^;]* waits in) (\w+(?: of \d+)?)(?: elements)?, number (\d+)"
)


@dataclass(frozen=True)
class MismatchCase:
    """A job, and what one of its ranks does otherwise than the others."""

    layout: str
    kind: str
    number: int
    flags: tuple[str, ...] = ()

    @property
    def name(self) -> str:
        """Say all of it in one word."""
        return f"mismatches/{self.layout}/{self.kind}/{self.number}"


def cases(times: int) -> list[MismatchCase]:
    """Return so many cases; all layouts come before one comes again, each time otherwise."""
    found = []
    for number in range(times):
        turn, layout = divmod(number, len(LAYOUT_NAMES))
        kind = KINDS[(turn + layout) % len(KINDS)]
        found.append(MismatchCase(LAYOUT_NAMES[layout], kind, number))
    return found


def run_mismatch(case: MismatchCase, folder: Path, references: References, seed: str) -> Result:
    """Start a job with a planted fault, and look at what is said of it."""
    source = random.Random(f"{seed} {case.name}")
    folder.mkdir(parents=True)
    num_ranks, layout = LAYOUTS[case.layout]
    victim, after = source.randrange(num_ranks), source.randrange(MOST_CALLS)
    words = [*MODEL.split(), *layout.split(), "--num-workers", "0", "--train-iters", "1000000"]
    words += ["--save", str(folder / "save"), "--save-interval", "1000000", *case.flags]
    words += ["--mismatch", case.kind, str(victim), str(after)]
    with CaseRun(case.name) as run:
        job = run.start(folder / "job", words, num_ranks=num_ranks)
        _await_planted(job)
        _judge(job, case.kind, victim, folder, run.result)
    return run.result


def _await_planted(job: Job) -> None:
    deadline = time.monotonic() + START_S
    while not _PLANTED.search(job.text()):
        if job.is_over() or time.monotonic() > deadline:
            raise MissedMomentError(f"nothing was planted: {job.text()[-1500:]}")
        time.sleep(POLL_S)


def _judge(job: Job, kind: str, victim: int, folder: Path, result: Result) -> None:
    began = time.monotonic()
    named_after = wait_for_verdict(job, NAMED_WITHIN_S)
    check_end(job, began, result)
    planted = _PLANTED.search(job.text())
    assert planted is not None
    record = read_failure(folder)
    result.facts = f"{planted[0]}, rank {victim}; {record.get('message', job.text()[-1500:])}"
    if named_after is None:
        result.problems.append(f"not named within {NAMED_WITHIN_S:g} s: {job.text()[-1500:]}")
        return
    result.facts = f"after {named_after:.1f} s: {result.facts}"
    result.problems += _check_sides(record, planted, kind, victim)


def _check_sides(
    record: dict[str, Any], planted: re.Match[str], kind: str, victim: int
) -> Iterator[str]:
    if record.get("class") not in ("COLLECTIVE_MISMATCH", "DEADLOCK"):
        yield f"the class is {record.get('class')}"
        return
    sides = {int(rank): (call, number) for rank, call, number in _SIDE.findall(record["message"])}
    if victim not in sides or len(sides) < 2:
        yield f"the sides are {sides}, without rank {victim} or another one"
        return
    mine, theirs, number = planted[1], planted[2], planted[3]
    own = sides.pop(victim)
    if kind == "skipped":
        # After a row of the same calls they part at its end.
        is_right = any(call == theirs and int(n) >= int(number) for call, n in sides.values())
    else:
        is_right = own == (mine, number) and (theirs, number) in sides.values()
    if not is_right:
        yield "those are not the calls"
