"""Ranks that compute longer than their peers, which --log-straggler has to name; and clean runs.

All ranks of a run share one core: of the cores of a virtual machine one may be a third slower than
the other for some seconds, and its ranks are, too.
"""

import os
import random
import re
import time
from dataclasses import dataclass
from pathlib import Path

from tests.faults.checks import References
from tests.faults.job import POLL_S, TIMEOUT_SCALE, Job
from tests.faults.result import Result

NUM_RANKS, NUM_STEPS, WITHIN_STEPS = 4, 45, 20
FACTOR = 1.3
END_S = 240.0 * TIMEOUT_SCALE
MODEL = (
    "--num-layers 2 --hidden-size 64 --num-attention-heads 4 --seq-length 64 --vocab-size 300"
    " --max-position-embeddings 64 --micro-batch-size 1 --global-batch-size 8 --mock-data"
    " --tokenizer-type NullTokenizer --lr 1e-3 --log-interval 15 --distributed-backend gloo"
    f" --train-iters {NUM_STEPS} --eval-iters 0 --log-straggler"
)
NAMED = re.compile(
    r"stragglers at iteration +(\d+) \| ranks? (\d+(?:, \d+)*) (?:is|has|have|waits)"
)


@dataclass(frozen=True)
class Straggler:
    """A run, and which of its ranks is slow."""

    name: str
    rank: int | None = None
    """None: none is."""
    begin: int = 1
    """First slow step."""


def run_straggler(case: Straggler, folder: Path, references: References) -> Result:
    """Train, and compare who is named with who is slow."""
    began = time.monotonic()
    words = [*MODEL.split(), "--metrics-jsonl", str(folder / "metrics.jsonl")]
    words += ["--on-core", str(random.choice(sorted(os.sched_getaffinity(0))))]
    if case.rank is not None:
        words += ["--slow-rank", str(case.rank), "--slow-factor", str(FACTOR)]
        words += ["--slow-from", str(case.begin)]
    job = Job(folder, words, num_ranks=NUM_RANKS)
    try:
        while not job.is_over() and time.monotonic() < began + END_S:
            time.sleep(POLL_S)
        code = job.process.poll()
    finally:
        job.end()
    named = [(int(step), ranks) for step, ranks in NAMED.findall(job.text())]
    result = judge(case, named)
    result.seconds = time.monotonic() - began
    if code != 0:
        result.problems.append(f"the run ended with {code}: {job.text()[-2000:]}")
    return result


def judge(case: Straggler, named: list[tuple[int, str]]) -> Result:
    """Compare (step, ranks) that were named with the case."""
    if case.rank is None:
        problems = [f"named without a reason: {named}"] if named else []
        return Result(case.name, problems, facts="nobody named")
    if wrong := [each for each in named if each[1] != str(case.rank)]:
        return Result(case.name, [f"named: {wrong}"])
    if not named:
        return Result(case.name, ["nobody was named"])
    num_steps = named[0][0] - case.begin + 1
    facts = f"rank {case.rank} named after {num_steps} steps"
    return Result(case.name, [] if 0 < num_steps <= WITHIN_STEPS else [facts], facts=facts)


def cases(times: int, seed: str = "0") -> list[Straggler]:
    """Return as many runs with a slow rank as clean ones, in turns."""
    source = random.Random(f"{seed} stragglers")
    found: list[Straggler] = []
    for number in range(times):
        rank, begin = source.randrange(NUM_RANKS), source.randint(1, NUM_STEPS - WITHIN_STEPS)
        found.append(Straggler(f"stragglers/slow-{number}/rank-{rank}-from-{begin}", rank, begin))
        found.append(Straggler(f"stragglers/clean-{number}/"))
    return found
