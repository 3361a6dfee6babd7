"""Watch jobs of tests, or random command lines, for races.

    python -m tests.gpu_without_gpu.races --tests "tests/distributed/distributed -k overlap"
    python -m tests.gpu_without_gpu.races --cases 50

The words of --tests are given to pytest. All jobs take NCCL's ways: a test of what only gloo or
shared memory does fails there for another reason, and is counted apart.
"""

import pickle
import shlex
import sys
import tempfile
from collections import Counter
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch

from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.settings.command_line import read_command_line
from tests.gpu_without_gpu.races.detector import watched
from tests.gpu_without_gpu.races.jobs import Watched, watched_body
from tests.harness.distributed import DistributedFailure, address_of
from tests.harness.pool import POOL
from tests.harness.worker import FunctionAddress, Outcome
from tests.parity.random_layouts.cases import draw_cases
from tests.parity.random_layouts.execution import Execution
from tests.parity.random_layouts.job import refusal_of


class RaceError(AssertionError):
    """Races of one rank."""


def watched_job(
    groups: ProcessGroupCollection, function: FunctionAddress, arguments: bytes
) -> tuple[bytes, int]:
    """One rank of a test's job: its pickled result, and the number of operations.

    Raises:
        RaceError: there is a race.
    """
    args, kwargs = pickle.loads(arguments)
    with watched() as detector:
        value = function.resolve()(groups, *args, **kwargs)
    if reports := [*detector.clocks[0].reports.values()]:
        raise RaceError("\n".join(reports))
    return pickle.dumps(value), detector.num_operations


class _Watch:
    """Has the jobs of tests watched, and counts."""

    def __init__(self) -> None:
        self.counts: Counter[str] = Counter()
        self._run = POOL.run

    def run(
        self, function: FunctionAddress, world_size: int, arguments: bytes, *rest: Any
    ) -> list[Outcome]:
        """Stand for the pool's `run`."""
        given = pickle.dumps(((function, arguments), {}))
        outcomes = self._run(address_of(watched_job), world_size, given, *rest)
        found = []
        for outcome in outcomes:
            if not outcome.failed:
                value, number = pickle.loads(outcome.result)
                self.counts["operations"] += number
                outcome = replace(outcome, result=value)
            found.append(outcome)
        has_race = any(outcome.error_type == "RaceError" for outcome in outcomes)
        has_failed = any(outcome.failed for outcome in outcomes)
        kind = "with races" if has_race else "failed otherwise" if has_failed else "without races"
        self.counts[f"jobs {kind}"] += 1
        return found


def watch_tests(words: list[str]) -> Counter[str]:
    """Run pytest with every job watched, and count."""
    watch = _Watch()
    POOL.run = watch.run  # type: ignore[method-assign,assignment]
    pytest.main(["-q", "--tb=short", "-p", "no:cacheprovider", *words])
    return watch.counts


def watch_cases(count: int, seed: int) -> Counter[str]:
    """Run random command lines, and count."""
    torch.set_num_threads(1)
    counts: Counter[str] = Counter()
    with tempfile.TemporaryDirectory(prefix="races-") as folder:
        execution = Execution(Path(folder))
        for case in (case for cases in draw_cases(seed, count) for case in cases):
            plain = replace(case, is_wide=False)
            try:
                ranks: list[Watched] = execution.run_ranks(
                    plain, watched_body, address_of(refusal_of), ()
                )
            except DistributedFailure as error:
                counts["jobs failed otherwise"] += 1
                print(f"{plain}\n{error}", flush=True)
                continue
            reports = {text for seen in ranks for text in seen.reports[""]}
            counts["jobs with races" if reports else "jobs without races"] += 1
            counts["operations"] += sum(seen.num_operations for seen in ranks)
            if reports:
                print(f"RACES\n{plain}\n" + "\n".join(sorted(reports)), flush=True)
    return counts


@dataclass(frozen=True, kw_only=True)
class Flags:
    """What the command line says."""

    tests: str = ""
    """Words for pytest."""
    cases: int = 0
    """Random command lines."""
    seed: int = 1


def main() -> int:
    """Watch what the command line says, and report."""
    options = read_command_line(
        Flags, prog="python -m tests.gpu_without_gpu.races", description=__doc__
    )
    counts = watch_cases(options.cases, options.seed)
    if options.tests:
        counts += watch_tests(shlex.split(options.tests))
    print(", ".join(f"{number} {kind}" for kind, number in counts.items()))
    return 1 if counts["jobs with races"] else 0


if __name__ == "__main__":
    sys.exit(main())
