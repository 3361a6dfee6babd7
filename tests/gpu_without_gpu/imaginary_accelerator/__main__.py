"""Take a training step of published models on an accelerator that computes shapes.

    python -m tests.gpu_without_gpu.imaginary_accelerator [--only NAME] [--results FILE]

For each layout of `runs`, the first, a middle and the last rank are built at their full size and
take two steps, in a process of their own. Prints of the second: where the host waited for the
accelerator, the peak of memory by what it is for, and bytes by group. Mixed devices and layouts
that a kernel refuses stop it.

With --results each rank is a line of a file of JSON; those that it has are not taken again, and
--document prints it as a table.
"""

import importlib
import json
import multiprocessing
import sys
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megatron.core.settings.command_line import read_command_line
from tests.gpu_without_gpu.imaginary_accelerator.accelerator import register
from tests.gpu_without_gpu.imaginary_accelerator.document import document, report
from tests.gpu_without_gpu.imaginary_accelerator.runs import RUNS, LargeRun


@dataclass(frozen=True, kw_only=True)
class Flags:
    """What the command line says."""

    only: str = ""
    """Part of the names of the models to take; all without it."""
    results: str = ""
    """A file with a line of JSON for each rank; what is in it is not taken again."""
    document: bool = False
    """Print what --results has as tables of a document, and take nothing."""
    words: str = ""
    """A command line of pretrain_gpt.py to take in place of the table's."""
    world_size: int = 8
    """Ranks of --words."""
    rank: int = -1
    """The one rank of --words to be, and print as JSON."""
    capture: bool = False
    """Say what a CUDA graph of the whole step could not hold."""
    num_microbatches: int = 4
    """Of a step of --words."""


def seen_of(run: LargeRun, rank: int) -> dict[str, Any]:
    """Be one rank."""
    register()
    from tests.gpu_without_gpu.imaginary_accelerator.steps import seen_step  # needs the device
    from tests.harness.resolved_run import run_of

    seen = seen_step(run_of(run.words, run.num_ranks), rank, run.num_microbatches)
    peak = seen.memory.peak
    return {
        "command": [run.words, run.num_ranks, rank],
        "seconds": round(seen.seconds, 1),
        "waits": dict(seen.waits),
        "obstacles": [[place, why, count] for (place, why), count in seen.obstacles.items()],
        "traffic": {" ".join(key): count for key, count in seen.traffic.items()},
        "operations": dict(seen.operations),
        "copied": seen.copied,
        "peak": peak.num_bytes,
        "kinds": {kind.value: count for kind, count in peak.kinds.items() if count},
        "when": seen.memory.peak_place,
    }


def seen_in_a_process(run: LargeRun, rank: int) -> dict[str, Any]:
    """Be one rank in a process of its own, which has the modules of this one.

    Raises:
        SystemExit: it failed.
    """
    try:
        with ProcessPoolExecutor(1, multiprocessing.get_context("fork")) as process:
            return process.submit(seen_of, run, rank).result()
    except Exception as problem:
        raise SystemExit(f"{run.name}, rank {rank}: {run.words}\n{problem!r}") from problem


def read_results(path: str) -> list[dict[str, Any]]:
    """Return the ranks that a file of results has."""
    if not path or not Path(path).exists():
        return []
    return [json.loads(line) for line in Path(path).read_text().splitlines()]


def main() -> int:
    """Take the ranks and print what was seen of each."""
    flags = read_command_line(Flags, prog=f"python -m {__spec__.parent}", description=__doc__)
    runs = [run for run in RUNS if flags.only in run.name]
    if flags.words:
        runs = [LargeRun("given", flags.world_size, flags.words, flags.num_microbatches)]
    if flags.rank >= 0:
        print(json.dumps(seen_of(runs[0], flags.rank)))
        return 0
    known = {tuple(seen["command"]): seen for seen in read_results(flags.results)}
    if flags.document:
        print("\n".join(document(runs, known)))
        return 0
    register()
    importlib.import_module(f"{__spec__.parent}.steps")  # once for all processes
    all_seen: list[dict[str, Any]] = []
    # First ranks of all runs before others: the table has soon something of everything.
    for run, rank in ((run, run.ranks[i]) for i in range(3) for run in runs):
        print(f"{run.name}, {run.num_ranks} ranks, {run.layout}: {run.words}")
        seen = known.get((run.words, run.num_ranks, rank))
        if seen is None:
            seen = seen_in_a_process(run, rank)
            if flags.results:
                with Path(flags.results).open("a") as file:
                    print(json.dumps(seen), file=file)
        all_seen.append(seen)
        print("\n".join(report(rank, seen, with_capture=flags.capture)), flush=True)
    waits = sum(sum(seen["waits"].values()) for seen in all_seen)
    longest = max(seen["seconds"] for seen in all_seen)
    print(
        f"{len(all_seen)} ranks of {len(runs)} runs; waits: {waits};"
        f" longest: {longest} s of a processor"
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
