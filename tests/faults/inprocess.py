"""Take ranks away from a job whose others go on in their processes, and compare its curve.

With a spare process the layout stays, and so does every bit. Without one fewer replicas go on, and
more as soon as there are: the losses are those of the same global batches, but for the order of
sums.
"""

import contextlib
import os
import random
import re
import signal
import socket
import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from megatron.resilience.restart_coordinator import PROCESS
from tests.faults.checks import (
    References,
    check_curve,
    check_remains,
    check_save_directory,
    read_metrics,
    train_in_harness,
)
from tests.faults.job import MODEL, POLL_S, TIMEOUT_SCALE, Job
from tests.faults.moments import MissedMomentError
from tests.faults.processes import Process
from tests.faults.promises import Kept, Promise
from tests.faults.result import CaseRun, Result
from tests.harness.tolerances import FP32_REORDERED_SUM, assert_close

LAUNCHER = "megatron.resilience.inprocess_restart"
GENERATION = re.compile(r"^launcher: generation (\d+) has (\d+) ranks: (.*)$", re.MULTILINE)
COME_BACK_S = 120.0 * TIMEOUT_SCALE
FINISHES = Promise(Kept.END, COME_BACK_S, "the others go on", is_success=True)
LAYOUTS = {
    # Ranks, flags.
    "dp2": (2, ""),
    "zero1": (2, "--use-distributed-optimizer"),
    "zero3": (2, "--data-parallel-sharding-strategy optim_grads_params"),
    "tp2-dp2": (4, "--tensor-model-parallel-size 2 --use-distributed-optimizer"),
    "pp2-dp2": (4, "--pipeline-model-parallel-size 2 --use-distributed-optimizer"),
}


@dataclass(frozen=True)
class InprocessCase:
    """A layout, and how many of its ranks are lost one after another."""

    layout: str
    num_failures: int

    @property
    def name(self) -> str:
        """Say it in one word."""
        return f"inprocess/{self.layout}/{self.num_failures}-failures"


@dataclass(frozen=True)
class ElasticCase:
    """Replicas that are left after each loss; then all come back."""

    sizes: tuple[int, ...] = (4, 3, 2, 4)
    global_batch: int = 12

    @property
    def name(self) -> str:
        """Say it in one word."""
        return "inprocess/elastic-" + "-".join(map(str, self.sizes))


def cases(num_failures: int) -> list[InprocessCase | ElasticCase]:
    """Return all cases."""
    kept: list[InprocessCase | ElasticCase] = [InprocessCase(n, num_failures) for n in LAYOUTS]
    return [*kept, ElasticCase()]


def generations(job: Job) -> list[tuple[int, list[str]]]:
    """Return (number, processes in the order of their ranks) of all that were told of."""
    found = GENERATION.findall(job.text())
    return [(int(number), names.split()) for number, _, names in found]


def members(job: Job) -> dict[int, Process]:
    """Return the living ranks of the newest generation."""
    living = {p.environment.get(PROCESS): p for p in job.processes() if p.parent == job.pid}
    names = generations(job)[-1][1]
    return {rank: living[name] for rank, name in enumerate(names) if name in living}


def await_that(job: Job, is_so: Callable[[], bool], doing: str) -> float:
    """Return after how many seconds `is_so()` holds.

    Raises:
        MissedMomentError: the job ended, or it took too long.
    """
    began = time.monotonic()
    while not is_so():
        if job.is_over() or time.monotonic() - began > COME_BACK_S:
            raise MissedMomentError(f"{doing}: {job.text()[-1500:]}")
        time.sleep(POLL_S)
    return time.monotonic() - began


def lose_a_rank(job: Job, number: int, rank: int) -> float:
    """Send a signal to a rank; return after how many seconds the next generation did a step."""
    before, ranks = len(generations(job)), members(job)
    if rank not in ranks:
        raise MissedMomentError(f"rank {rank} is gone: {job.text()[-1500:]}")
    os.kill(ranks[rank].pid, number)
    lost_at = time.monotonic()
    await_that(job, lambda: len(generations(job)) > before, "waiting for new groups")
    steps = len(job.iterations())
    await_that(job, lambda: len(job.iterations()) > steps, "waiting for a step")
    return time.monotonic() - lost_at


def run_inprocess(
    case: InprocessCase | ElasticCase, folder: Path, references: References, seed: str
) -> Result:
    """Run one case."""
    if isinstance(case, ElasticCase):
        return run_elastic(case, folder, seed)
    source = random.Random(f"{seed} {case.name}")
    num_ranks, layout = LAYOUTS[case.layout]
    num_steps = 15 * (case.num_failures + 1)
    folder.mkdir(parents=True)
    with CaseRun(case.name) as run:
        words = [*MODEL.split(), *layout.split(), "--train-iters", str(num_steps)]
        words += ["--num-workers", "2", "--slow-step", "0.02", "--save", str(folder / "save")]
        words += ["--hold-file", str(folder / "hold")]
        words += ["--save-interval", "10", "--load", str(folder / "save")]
        words += ["--metrics-jsonl", str(folder / "metrics")]
        job = run.start(
            folder / "job", words, num_ranks=num_ranks, launcher=LAUNCHER,
            launcher_flags=("--spares", "1", *port_of(source)),
        )  # fmt: skip
        returned = []
        for number in range(case.num_failures):
            count = len(job.iterations()) + source.randrange(2, 6)
            await_that(job, lambda n=count: len(job.iterations()) >= n, f"before loss {number}")
            hold_until_ready(job, folder / "hold", num_ranks + 1)
            time.sleep(source.uniform(0.0, 0.1))
            act = signal.SIGSTOP if number % 3 == 2 else signal.SIGKILL
            returned.append(lose_a_rank(job, act, source.randrange(num_ranks)))
        left = job.wait_until_gone(COME_BACK_S)
        if left or job.process.returncode:
            run.result.problems.append(f"exit status {job.process.returncode}, there: {left}")
        run.result.problems += check_remains(job, FINISHES)
        run.result.problems += check_save_directory(folder / "save", is_clean=True)
        reference = references.curve(num_ranks, num_steps, layout)
        run.result.problems += check_curve(folder, reference, num_steps)
        run.result.facts = describe(returned, job)
    return run.result


def run_elastic(case: ElasticCase, folder: Path, seed: str) -> Result:
    """Lose replicas until the fewest are left, let all come back, and compare the losses with those
    of a run that loses none."""
    source = random.Random(f"{seed} {case.name}")
    num_steps = 60
    folder.mkdir(parents=True)
    with CaseRun(case.name) as run:
        words = [*MODEL.split(), "--train-iters", str(num_steps), "--use-distributed-optimizer"]
        words += ["--global-batch-size", str(case.global_batch), "--num-workers", "0"]
        metrics = {name: folder / f"{name}.jsonl" for name in ("undisturbed", "elastic")}
        flags = [*words[len(MODEL.split()) + 2 :], "--save-interval", "1000"]
        place = folder / "save"
        train_in_harness(place, metrics["undisturbed"], case.sizes[0], *flags, num_steps=num_steps)
        job = run.start(
            folder / "job",
            [*words, "--slow-step", "0.02", "--hold-file", str(folder / "hold"), "--metrics-jsonl",
            str(metrics["elastic"])], num_ranks=case.sizes[0], launcher=LAUNCHER,
            launcher_flags=("--min-ranks", str(min(case.sizes)), "--replacement-delay-s", "8",
            *port_of(source)),
        )  # fmt: skip
        returned = []
        for size in case.sizes[1:-1]:
            count = len(job.iterations()) + 3
            await_that(job, lambda n=count: len(job.iterations()) >= n, "steps")
            returned.append(lose_a_rank(job, signal.SIGKILL, source.randrange(size + 1)))
        hold_until_ready(job, folder / "hold", case.sizes[-1])
        left = job.wait_until_gone(COME_BACK_S)
        if left or job.process.returncode:
            run.result.problems.append(f"exit status {job.process.returncode}, there: {left}")
        found = {name: dict(losses(path)) for name, path in metrics.items()}
        sizes = [len(names) for _, names in generations(job)]
        if sizes[: len(case.sizes) - 1] != list(case.sizes[:-1]) or sizes[-1] != case.sizes[-1]:
            run.result.problems.append(f"the generations have {sizes} ranks")
        try:
            assert found["elastic"].keys() == found["undisturbed"].keys(), "steps are missing"
            actual = [found["elastic"][step] for step in sorted(found["elastic"])]
            expected = [found["undisturbed"][step] for step in sorted(found["undisturbed"])]
            assert_close(actual, expected, FP32_REORDERED_SUM, "losses")
        except AssertionError as error:
            run.result.problems.append(str(error))
        run.result.facts = f"{sizes} ranks; {describe(returned, job)}"
    return run.result


def losses(path: Path) -> Iterator[tuple[int, float]]:
    """Yield step and loss."""
    for step, fields in read_metrics(path):
        if "lm loss" in fields:
            yield step, fields["lm loss"]


def hold_until_ready(job: Job, hold: Path, number: int) -> None:
    """Let no step end until so many processes train or wait to, their imports done."""

    def is_ready() -> bool:
        named = set(generations(job)[-1][1])
        ready = set(re.findall(r"^launcher: (\S+) waits$", job.text(), re.MULTILINE))
        living = {p.environment.get(PROCESS) for p in job.processes() if p.parent == job.pid}
        return len((ready | named) & living) >= number

    hold.touch()
    await_that(job, is_ready, "waiting for a spare")
    hold.unlink()


def port_of(source: random.Random) -> tuple[str, ...]:
    """Return flags for a port that nobody uses, nor is given to a connection."""
    while True:
        port = source.randrange(20000, 28000)
        with socket.socket() as listener, contextlib.suppress(OSError):
            listener.bind(("", port))
            return ("--master-port", str(port))


def describe(returned: list[float], job: Job) -> str:
    """Say how long it took from a loss to the next step."""
    if not returned:
        return ""
    kept = len(re.findall("from memory copies", job.text()))
    return (
        f"loss to next step: median {statistics.median(returned):.1f} s, longest"
        f" {max(returned):.1f} s; {kept} times from memory"
    )
