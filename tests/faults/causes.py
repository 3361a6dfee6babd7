"""Faults whose first symptom is not their cause: the line FATAL must name the cause, and the rank.

    corpus-overwritten   zeros are written into the tokens while the run reads them
    corpus-replaced      other tokens of the same sizes, between a run and the one that resumes it
    stage-killed         SIGKILL to a rank of TP 2 x PP 2
    address-space        `ulimit -v`: a thread or memory is refused
    two-interrupts       Ctrl-C twice, 10 ms apart

A deadlock inside a rank, a flipped bit and a lost link are other campaigns: `hangs`,
`python -m tests.faults.wrong_numbers bits` and `namespaces`.
"""

import os
import random
import re
import signal
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import numpy as np

from tests.faults.checks import References
from tests.faults.hangs import read_failure, wait_for_steps
from tests.faults.job import FATAL, MODEL, TIMEOUT_SCALE, Job
from tests.faults.moments import MissedMomentError
from tests.faults.result import Result
from tests.unit.datasets.corpora import write_corpus

ENDED_WITHIN_S = 60.0 * TIMEOUT_SCALE
LIMIT_MIB, STEP_MIB = 1050, (20, 90)
"""The first limit of the address space, and by how much the next is lower if the run trains."""


def run_cause(
    scenario: str, number: int, folder: Path, references: References, seed: str
) -> Result:
    """Run one scenario once."""
    result, began = Result(f"causes/{scenario}/{number}"), time.monotonic()
    source = random.Random(f"{seed} {result.name}")
    folder.mkdir(parents=True)
    jobs: list[Job] = []
    try:
        SCENARIOS[scenario](folder, source, jobs, result)
    except (MissedMomentError, OSError) as error:
        result.problems.append(f"{type(error).__name__}: {error}")
    finally:
        for job in jobs:
            job.end()
        result.seconds = time.monotonic() - began
    return result


def _start(
    folder: Path, jobs: list[Job], flags: str, num_ranks: int, prefix: tuple[str, ...] = ()
) -> Job:
    words = [*MODEL.split(), *flags.split(), "--num-workers", "0", "--slow-step", "0.05"]
    if "--data-path" in words:
        words.remove("--mock-data")
    save = ["--save", str(folder / "save"), "--load", str(folder / "save")]
    job = Job(folder / f"job-{len(jobs)}", [*words, *save], num_ranks=num_ranks, prefix=prefix)
    jobs.append(job)
    return job


def _judge(job: Job, folder: Path, result: Result, causes: str, *said: str) -> None:
    """Wait for the end of the job; it must print one line FATAL, of a class in `causes`.

    Each rank has a limit of memory of its own. A rank without memory cannot ask the store whether
    another rank has reported, so of LIMIT and OOM every rank may print a line.
    """
    began = time.monotonic()
    if left := job.wait_until_gone(ENDED_WITHIN_S):
        result.problems.append(f"still there: {'; '.join(map(str, left))}")
        job.end()
    result.ended_after_s = time.monotonic() - began
    classes, text = FATAL.findall(job.text()), job.text()
    lines = [line for line in text.splitlines() if line.startswith("FATAL")]
    record = read_failure(folder)
    is_once = len(classes) == 1 or set(causes.split()) == {"LIMIT", "OOM"}
    if not is_once or not classes or set(classes) - set(causes.split()):
        result.problems.append(f"FATAL lines {lines or text[-1500:]} instead of one {causes}")
    for pattern in said:
        if not re.search(pattern, str(record.get("message")) + " ".join(lines)):
            result.problems.append(f"{pattern!r} is not in {record} {lines}")
    result.facts = " ".join(lines)[:150]


def _tokens(source: random.Random) -> list[list[int]]:
    return [[source.randrange(1, 299) for _ in range(64)] for _ in range(200)]


def _write(folder: Path, source: random.Random) -> str:
    prefix = folder / "corpus"
    write_corpus(prefix, [np.array(document) for document in _tokens(source)])
    return str(prefix)


def corpus_overwritten(
    folder: Path, source: random.Random, jobs: list[Job], result: Result
) -> None:
    """Write zeros into the tokens, in place."""
    prefix = _write(folder, source)
    flags = f"--data-path {prefix} --train-iters 10000 --save-interval 10000"
    job = _start(folder, jobs, flags, 2)
    wait_for_steps(job, source.randint(2, 8))
    path = Path(f"{prefix}.bin")
    with open(path, "r+b") as file:
        file.write(bytes(path.stat().st_size))
    _judge(job, folder, result, "DATA", r"corpus\.bin was written to while this run read it")


def corpus_replaced(folder: Path, source: random.Random, jobs: list[Job], result: Result) -> None:
    """Train, write other documents of the same lengths under the same name, and resume."""
    prefix = _write(folder, source)
    steps = source.randint(3, 8)
    first = _start(
        folder, jobs, f"--data-path {prefix} --train-iters 24 --exit-interval {steps}", 2
    )
    first.wait_until_gone(120.0)
    _write(folder, source)
    job = _start(folder, jobs, f"--data-path {prefix} --train-iters 24", 2)
    _judge(job, folder, result, "DATA", "the contents of a corpus")


def stage_killed(folder: Path, source: random.Random, jobs: list[Job], result: Result) -> None:
    """Kill a rank of a job with pipeline stages."""
    flags = "--tensor-model-parallel-size 2 --pipeline-model-parallel-size 2 --train-iters 10000"
    job = _start(folder, jobs, flags, 4)
    wait_for_steps(job, source.randint(2, 8))
    time.sleep(source.uniform(0.0, 1.0))
    victim = source.randrange(4)
    os.kill(job.ranks()[victim].pid, signal.SIGKILL)
    _judge(
        job, folder, result, "PEER_LOST", rf"rank {victim} \(process \d+\) was killed by signal 9"
    )


def address_space(folder: Path, source: random.Random, jobs: list[Job], result: Result) -> None:
    """Lower the limit of the address space until the run cannot start or cannot go on."""
    limit_mib = LIMIT_MIB
    while True:
        limit_mib -= source.randint(*STEP_MIB)
        prefix = ("sh", "-c", f'ulimit -v {limit_mib * 1024}; exec "$0" "$@"')
        job = _start(folder, jobs, "--train-iters 10000", 2, prefix)
        try:
            wait_for_steps(job, 2)
        except MissedMomentError:
            break
        job.end()
    if "terminate called" in job.text():  # in gloo, before any rank can name a cause
        if job.wait_until_gone(ENDED_WITHIN_S) or FATAL.search(job.text()):
            result.problems.append("the job goes on, or names a cause, after gloo has aborted")
        result.facts = f"{limit_mib} MiB: gloo aborted; no cause is named"
        return
    _judge(job, folder, result, "LIMIT OOM", "ulimit -v")
    result.facts = f"{limit_mib} MiB: {result.facts}"


def two_interrupts(folder: Path, source: random.Random, jobs: list[Job], result: Result) -> None:
    """Interrupt all ranks as a terminal does, and again 10 ms later."""
    job = _start(folder, jobs, "--train-iters 10000", 2)
    wait_for_steps(job, source.randint(2, 8))
    time.sleep(source.uniform(0.0, 0.3))
    for _ in range(2):
        os.killpg(job.pid, signal.SIGINT)
        time.sleep(0.01)
    _judge(job, folder, result, "INTERRUPTED")
    # torchrun prints a traceback of its own at the second interrupt.
    if re.search(r'File "[^"]*(pretrain_gpt|/megatron/)', job.text()):
        result.problems.append("a rank prints a traceback")


SCENARIOS: dict[str, Callable[[Path, random.Random, list[Job], Result], None]] = {
    "corpus-overwritten": corpus_overwritten,
    "corpus-replaced": corpus_replaced,
    "stage-killed": stage_killed,
    "address-space": address_space,
    "two-interrupts": two_interrupts,
}


def tasks(times: int, seed: str, pattern: str) -> list[tuple[str, Callable[..., Result]]]:
    """Return (name, what runs it) of each scenario, `times` times."""
    return [
        (f"causes/{scenario}/{number}", partial(run_cause, scenario, number, seed=seed))
        for number in range(times)
        for scenario in SCENARIOS
        if not pattern or any(word in scenario for word in pattern.split("|"))
    ]
