"""Cost of `--layout-invariant-mode` beside the same layout without it.

    python -m benchmarks.layout_invariance
    python -m benchmarks.layout_invariance --profile          # where the time goes, in one process

Single-threaded gloo processes train the GPT of `benchmarks.two_ranks` (width 512, 8 layers) in one
process and on two ranks, with clipping and Adam. Steps with and without the mode alternate in the
same processes. A row has medians, and the median, smallest and largest ratio of a step and the step
after it, in seconds of the clock and of the processor of rank 0. Memory is the largest resident set
of a rank, in fresh processes for each mode.
"""

from __future__ import annotations

import multiprocessing
import os
import resource
import statistics
import tempfile
from dataclasses import dataclass

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

from benchmarks.two_ranks import build_step, seconds
from megatron.core import parallel_state
from megatron.core.parameters.rng import rng_state
from megatron.core.settings.command_line import read_command_line

LAYOUTS: dict[str, tuple[int, dict[str, int]]] = {
    "one process": (1, {}),
    "tp 2": (2, {"tp": 2}),
    "dp 2": (2, {}),
    "pp 2": (2, {"pp": 2}),
}
"""Name -> (ranks, sizes)."""


@dataclass(frozen=True, kw_only=True)
class Flags:
    """Flags of the command line."""

    rounds: int = 7
    """Alternating pairs of steps per layout."""
    microbatches: int = 4
    """Micro batches of a replica."""
    profile: bool = False
    """Print the operators whose time differs most, in one process."""


def _begin(rank: int, store: str, name: str) -> object:
    torch.set_num_threads(1)
    world, sizes = LAYOUTS[name]
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=world)
    rng_state().set_seed(1)
    return parallel_state.initialize_model_parallel(sizes.get("tp", 1), sizes.get("pp", 1))


def _step(groups: object, name: str, flags: Flags, *, invariant: bool):
    sizes = LAYOUTS[name][1]
    return build_step(
        groups, microbatches=flags.microbatches, invariant=invariant, optimizes=True, **sizes
    )


def measure(rank: int, store: str, name: str, flags: Flags) -> None:
    """Time a layout with and without the mode; the main function of a process."""
    groups = _begin(rank, store, name)
    modes = [_step(groups, name, flags, invariant=invariant) for invariant in (False, True)]
    for step in modes:
        step()
    pairs = [[seconds(step) for step in modes] for _ in range(flags.rounds)]
    if rank == 0:
        texts = []
        for kind, what in enumerate(("wall", "processor")):
            times = [[one[kind] for one in pair] for pair in pairs]
            plain, mode = (statistics.median(column) for column in zip(*times, strict=True))
            ratios = sorted(after / before for before, after in times)
            texts.append(
                f"{what} {plain * 1e3:6.0f} ms, with the mode {mode * 1e3:6.0f} ms, ratio"
                f" {statistics.median(ratios):.3f} ({ratios[0]:.3f} ... {ratios[-1]:.3f})"
            )
        print(f"{name:<12} {'; '.join(texts)}; load {os.getloadavg()[0]:.0f}", flush=True)
    dist.destroy_process_group()


def measure_memory(rank: int, store: str, name: str, flags: Flags, invariant: bool, peaks) -> None:
    """Put the largest resident set of two steps in MiB into a queue; the main function of a
    process."""
    groups = _begin(rank, store, name)
    step = _step(groups, name, flags, invariant=invariant)
    step()
    step()
    peaks.put(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024)
    dist.barrier()
    dist.destroy_process_group()


def print_profile(rank: int, store: str, flags: Flags) -> None:
    """Print the operators whose time differs most between the modes; runs in a process."""
    groups = _begin(rank, store, "one process")
    found = []
    for invariant in (False, True):
        step = _step(groups, "one process", flags, invariant=invariant)
        step()
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
            step()
        found.append({row.key: row for row in profile.key_averages()})
    plain, mode = found

    def time_of(rows: dict, key: str) -> float:
        return rows[key].self_cpu_time_total / 1e3 if key in rows else 0.0

    keys = sorted(plain | mode, key=lambda key: time_of(plain, key) - time_of(mode, key))
    print(f"{'operator':<40} {'without':>10} {'with':>10} {'calls':>8} {'calls':>8}")
    for key in keys[:14] + keys[-4:]:
        calls = [rows[key].count if key in rows else 0 for rows in found]
        times = [time_of(rows, key) for rows in found]
        print(f"{key:<40} {times[0]:7.1f} ms {times[1]:7.1f} ms {calls[0]:8} {calls[1]:8}")
    total = [sum(time_of(rows, key) for key in rows) for rows in found]
    print(f"{'all':<40} {total[0]:7.1f} ms {total[1]:7.1f} ms")


def main() -> None:
    """Measure all layouts, and print."""
    flags = read_command_line(Flags, description=(__doc__ or "").splitlines()[0])
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    with tempfile.TemporaryDirectory() as directory:
        if flags.profile:
            mp.spawn(print_profile, args=(os.path.join(directory, "profile"), flags), nprocs=1)
            return
        for name, (world, _) in LAYOUTS.items():
            store = os.path.join(directory, name.replace(" ", "-"))
            mp.spawn(measure, args=(store, name, flags), nprocs=world)
            peaks = []
            for invariant in (False, True):
                queue = multiprocessing.get_context("spawn").SimpleQueue()
                args = (f"{store}-{invariant}", name, flags, invariant, queue)
                mp.spawn(measure_memory, args=args, nprocs=world)
                peaks.append(max(queue.get() for _ in range(world)))
            print(f"{name:<12} {peaks[0]:7.0f} MiB with the mode {peaks[1]:7.0f} MiB", flush=True)


if __name__ == "__main__":
    main()
