"""The command; see the package."""

import sys
import tempfile
import time
from collections import Counter
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from megatron.core.settings.command_line import read_command_line
from tests.gpu_without_gpu.collective_order import __doc__ as about
from tests.gpu_without_gpu.collective_order.checks import problems_of
from tests.gpu_without_gpu.collective_order.jobs import recorded_body
from tests.harness.distributed import DistributedFailure, address_of
from tests.parity.random_layouts.cases import Case, draw_cases
from tests.parity.random_layouts.execution import Execution
from tests.parity.random_layouts.job import refusal_of


@dataclass(frozen=True, kw_only=True)
class Flags:
    """What the command line says."""

    cases: int = 50
    seed: int = 1
    command: str | None = None
    """Run this line alone, in the form in which failures are printed."""


def check(case: Case, execution: Execution, counts: Counter[str]) -> list[str]:
    """Return what is wrong with a case, and count it and its calls."""
    try:
        outcomes = execution.run_ranks(case, recorded_body, address_of(refusal_of))
    except DistributedFailure as error:
        counts["failures"] += 1
        return [str(error)]
    if any(refusal for refusal, _ in outcomes):
        counts["refused"] += 1
        return []
    logs = [log for _, log in outcomes]
    problems = problems_of(logs)
    counts["failures" if problems else "in order"] += 1
    counts["calls"] += sum(len(log.calls) for log in logs)
    return problems


def main() -> int:
    """Run cases and report."""
    options = read_command_line(
        Flags, prog="python -m tests.gpu_without_gpu.collective_order", description=about
    )
    torch.set_num_threads(1)
    drawn = [case for cases in draw_cases(options.seed, options.cases) for case in cases]
    cases = [Case.read(options.command)] if options.command else drawn
    begun, counts = time.monotonic(), Counter[str]()
    with tempfile.TemporaryDirectory(prefix="collective-order-") as folder:
        execution = Execution(Path(folder))
        for case in cases:
            # Orders do not depend on the width, and fp64 would need other workers.
            problems = check(replace(case, is_wide=False), execution, counts)
            if problems:
                print(f"FAILURE\n{case}\n" + "\n".join(problems), flush=True)
    seconds = time.monotonic() - begun
    shown = ", ".join(f"{count} {kind}" for kind, count in counts.items())
    print(f"{len(cases)} cases in {seconds:.0f} s: {shown}")
    return 1 if counts["failures"] else 0


if __name__ == "__main__":
    sys.exit(main())
