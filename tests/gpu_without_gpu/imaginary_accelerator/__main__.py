"""Take a training step of published models on an accelerator that computes shapes.

    python -m tests.gpu_without_gpu.imaginary_accelerator [--only NAME]

For each layout of `runs`, the first rank of each kind of pipeline stage (first, middle, last) is
built at its full size and takes two steps, in a process of its own. Prints of the second: where the
host waited for the accelerator, the peak of memory by what it is for, and bytes by group. Mixed
devices and layouts that a kernel refuses stop it.
"""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import dataclass
from typing import Any

from megatron.core.settings.command_line import read_command_line
from tests.gpu_without_gpu.imaginary_accelerator.accelerator import register
from tests.gpu_without_gpu.imaginary_accelerator.runs import RUNS, LargeRun

GIB = 2**30


@dataclass(frozen=True, kw_only=True)
class Flags:
    """What the command line says."""

    only: str = ""
    """Part of the names of the models to take; all without it."""
    words: str = ""
    """A command line of pretrain_gpt.py to take in place of the table's."""
    world_size: int = 8
    """Ranks of --words."""
    rank: int = -1
    """The one rank to be, and print as JSON."""
    capture: bool = False
    """Say what a CUDA graph of the whole step could not hold."""
    num_microbatches: int = 4
    """Of a step of --words."""


def rank_as_json(flags: Flags) -> str:
    """Be one rank."""
    register()
    from tests.gpu_without_gpu.imaginary_accelerator.steps import seen_step  # needs the device
    from tests.harness.resolved_run import run_of

    seen = seen_step(run_of(flags.words, flags.world_size), flags.rank, flags.num_microbatches)
    peak = seen.memory.peak
    return json.dumps(
        {
            "seconds": round(seen.seconds, 1),
            "waits": seen.waits,
            "obstacles": [[place, why, count] for (place, why), count in seen.obstacles.items()],
            "traffic": {" ".join(key): count for key, count in seen.traffic.items()},
            "peak": peak.num_bytes,
            "kinds": {kind.value: count for kind, count in peak.kinds.items() if count},
            "when": seen.memory.peak_place,
        }
    )


def ranks_of(run: LargeRun) -> list[int]:
    """Return the first rank of the first, a middle and the last pipeline stage."""
    from megatron.planner.program_memory import first_rank_of_stages
    from tests.harness.resolved_run import run_of

    firsts = first_rank_of_stages(run_of(run.words, run.num_ranks))
    return sorted({firsts[0], firsts[len(firsts) // 2], firsts[-1]})


def seen_of(run: LargeRun, rank: int) -> dict[str, Any]:
    """Run one rank in a process of its own.

    Raises:
        SystemExit: it failed; with the end of its output.
    """
    command = [sys.executable, "-m", __spec__.parent, "--words", run.words]
    command += ["--world-size", str(run.num_ranks), "--rank", str(rank)]
    command += ["--num-microbatches", str(run.num_microbatches)]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        raise SystemExit(f"{run.name}, rank {rank}: {run.words}\n{done.stderr[-3000:]}")
    return json.loads(done.stdout.splitlines()[-1])


def main() -> int:
    """Print the table."""
    flags = read_command_line(Flags, prog=f"python -m {__spec__.parent}", description=__doc__)
    if flags.rank >= 0:
        print(rank_as_json(flags))
        return 0
    runs = [run for run in RUNS if flags.only in run.name]
    if flags.words:
        given = LargeRun("given", flags.world_size, flags.words, flags.num_microbatches)
        runs = [given]
    all_seen: list[dict[str, Any]] = []
    for run in runs:
        print(f"{run.name}, {run.num_ranks} ranks: {run.words}")
        for rank in ranks_of(run):
            seen = seen_of(run, rank)
            all_seen.append(seen)
            kinds = ", ".join(f"{kind} {n / GIB:.2f}" for kind, n in seen["kinds"].items())
            traffic = ", ".join(f"{key} {n / GIB:.2f}" for key, n in seen["traffic"].items())
            waits = ", ".join(f"{place} x{n}" for place, n in seen["waits"].items()) or "none"
            print(
                f"  rank {rank}, {seen['seconds']} s of a processor:"
                f" peak {seen['peak'] / GIB:.2f} GiB in {seen['when']} ({kinds})"
                f"\n    exchanged GiB: {traffic}\n    waits: {waits}",
                flush=True,
            )
            if flags.capture:
                print(capture_report(seen), flush=True)
    print(
        f"{len(all_seen)} ranks of {len(runs)} runs; waits: {sum(map(num_waits, all_seen))};"
        f" longest: {max(seen['seconds'] for seen in all_seen)} s of a processor"
    )
    return 0


def capture_report(seen: dict[str, Any]) -> str:
    """Return what prevents the capture of a step that `seen_of` returned, by reason, in lines."""
    by_reason: dict[str, list[str]] = {}
    for place, why, count in sorted(seen["obstacles"]):
        by_reason.setdefault(why, []).append(f"      {place} x{count}")
    lines = [line for why, places in by_reason.items() for line in (f"    {why}:", *places)]
    if not lines:
        return "    nothing that was seen prevents the capture of a CUDA graph"
    return "\n".join(["    prevents the capture of a CUDA graph:", *lines])


def num_waits(seen: dict[str, Any]) -> int:
    """Return how often the host waited in what `seen_of` returned."""
    return sum(seen["waits"].values())


if __name__ == "__main__":
    sys.exit(main())
