"""Prove every pipeline program up to p=16, v=4, m=64: `python -m tests.parity.schedules`.

For each schedule and each (p, v, m) the program is lowered and validated (each step once, data in
order, bounded buffers, no deadlock with buffered and with rendezvous channels), simulated, and
compared with the textbook: the bubble must equal the formula exactly, and the strictest channels
must cost no time. Prints one line per schedule; exits with status 1 if anything fails. Takes
about five minutes of processor time; `--all-groups --prefetch 0 1` twenty-six.
"""

from __future__ import annotations

import multiprocessing
import os
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

from megatron.core.foundation.errors import ScheduleError
from megatron.core.pipeline_parallel.instructions import Orders
from megatron.core.pipeline_parallel.lower import lower
from megatron.core.pipeline_parallel.schedule_definitions.dualpipe_v import dualpipe_v_orders
from megatron.core.pipeline_parallel.schedule_definitions.forward_only import forward_only_orders
from megatron.core.pipeline_parallel.schedule_definitions.gpipe import gpipe_orders
from megatron.core.pipeline_parallel.schedule_definitions.interleaved import interleaved_orders
from megatron.core.pipeline_parallel.schedule_definitions.one_f_one_b import one_f_one_b_orders
from megatron.core.pipeline_parallel.schedule_definitions.zero_bubble import zero_bubble_h1_orders
from megatron.core.pipeline_parallel.schedule_definitions.zero_bubble_v import zero_bubble_v_orders
from megatron.core.pipeline_parallel.simulate import simulate
from megatron.core.pipeline_parallel.validate import validate
from megatron.core.settings.command_line import read_command_line
from megatron.core.settings.flags import flag

Make = Callable[[int, int, int], Orders]
SCHEDULES: dict[str, tuple[bool, Make]] = {
    "gpipe": (False, lambda p, v, m: gpipe_orders(p, m)),
    "1f1b": (False, lambda p, v, m: one_f_one_b_orders(p, m)),
    "1f1b, combined": (False, lambda p, v, m: one_f_one_b_orders(p, m, overlap_f_b=True)),
    "interleaved, group p": (True, lambda p, v, m: interleaved_orders(p, m, v)),
    "interleaved, group p+1": (True, lambda p, v, m: interleaved_orders(p, m, v, p + 1)),
    "interleaved, group 2p": (True, lambda p, v, m: interleaved_orders(p, m, v, 2 * p)),
    "interleaved, combined": (
        True,
        lambda p, v, m: interleaved_orders(p, m, v, overlap_f_b=True),
    ),
    "interleaved, combined, p+1": (
        True,
        lambda p, v, m: interleaved_orders(p, m, v, p + 1, overlap_f_b=True),
    ),
    "interleaved, combined, 2p": (
        True,
        lambda p, v, m: interleaved_orders(p, m, v, 2 * p, overlap_f_b=True),
    ),
    "forward only": (True, lambda p, v, m: forward_only_orders(p, m, v)),
    "zb-h1": (False, lambda p, v, m: zero_bubble_h1_orders(p, m)),
    "zb-v": (True, lambda p, v, m: zero_bubble_v_orders(p, m)),
    "dualpipe-v": (True, lambda p, v, m: dualpipe_v_orders(p, m)),
}
"""Name -> (takes several chunks, maker)."""
IN_A_V = ("zb-v", "dualpipe-v")
LARGER_GROUPS = (
    "interleaved, group p+1",
    "interleaved, group 2p",
    "interleaved, combined, p+1",
    "interleaved, combined, 2p",
)


@dataclass
class CorpusStats:
    """What was found for one schedule.

    `num_with_formula` counts the cases for which the formula is stated (m a multiple of p, or one
    chunk); for the others, `worst_padded` is the largest makespan as a share of what the formula
    says for m rounded up to a multiple of p.
    """

    num_programs: int = 0
    num_steps: int = 0
    num_with_formula: int = 0
    worst_padded: float = 0.0
    seconds: float = 0.0
    problems: list[str] = field(default_factory=list)

    def add(self, other: CorpusStats) -> None:
        """Take over another tally."""
        self.num_programs += other.num_programs
        self.num_steps += other.num_steps
        self.num_with_formula += other.num_with_formula
        self.worst_padded = max(self.worst_padded, other.worst_padded)
        self.seconds += other.seconds
        self.problems += other.problems


def textbook_makespan(name: str, p: int, v: int, m: int, forward_only: bool) -> float:
    """Return the makespan with forward 1 and backward 2: bubble (p-1)/(v*m+p-1), a third of it
    where weight gradients fill the waits."""
    if name in ("zb-h1", *IN_A_V):
        return 3.0 * v * m + p - 1
    return (v * m + p - 1) * (1.0 if forward_only else 3.0)


def textbook_peak(name: str, p: int, v: int, m: int, rank: int, group: int) -> int:
    """Return the most activations that a rank holds, in (micro batch, chunk) pairs."""
    if name == "gpipe":
        return m
    if name in ("zb-h1", *IN_A_V):
        return v * p + (name == "dualpipe-v")
    if name == "1f1b":
        return min(p - rank, m)
    if name == "1f1b, combined":
        return min(2 * (p - rank), m)
    if name == "forward only":
        return 1
    warm_up = 2 * (p - rank - 1) + (v - 1) * group
    return min(warm_up + 1 + ("combined" in name), v * m)


def has_formula(name: str, p: int, v: int, m: int) -> bool:
    """Return whether the textbook states the makespan; ZB-V's is a bound that others miss by
    little, and below p micro batches no weight gradient is there to fill a wait."""
    if name == "zb-h1":
        return m >= p
    if name == "zb-v":
        return False
    return v == 1 or m % p == 0 or name == "dualpipe-v"


def check(name: str, p: int, v: int, m: int, prefetch: int, tally: CorpusStats) -> None:
    """Prove one program."""
    orders = SCHEDULES[name][1](p, v, m)
    program = lower(orders, prefetch=prefetch)
    tally.num_programs += 1
    tally.num_steps += sum(len(steps) for steps in program.ranks)
    case = f"{name} p={p} v={v} m={m} prefetch={prefetch}"
    try:
        strict = validate(program)
        found = simulate(program, forward=1.0, backward=2.0)
    except ScheduleError as problem:
        tally.problems.append(f"{case}: {problem}")
        return
    strict_makespan = max(span.end for span in strict.spans)
    if strict_makespan != found.makespan:
        tally.problems.append(f"{case}: rendezvous {strict_makespan}, buffered {found.makespan}")
    expected = textbook_makespan(name, p, v, m, orders.forward_only)
    if has_formula(name, p, v, m):
        tally.num_with_formula += 1
        busy = sum(found.busy) / p
        if found.makespan != expected or abs(found.bubble - 1 + busy / expected) > 1e-12:
            tally.problems.append(f"{case}: makespan {found.makespan}, formula {expected}")
    else:
        padded = textbook_makespan(name, p, v, -(-m // p) * p, orders.forward_only)
        tally.worst_padded = max(tally.worst_padded, found.makespan / padded)
    for rank, peak in enumerate(found.peak_live_activations):
        group = orders.send_window if v > 1 and m > 1 else 1
        if peak > textbook_peak(name, p, v, m, rank, max(group, 1)):
            tally.problems.append(f"{case}: rank {rank} holds {peak} activations")


def cases(name: str, p: int, max_v: int, max_m: int) -> Iterator[tuple[int, int]]:
    """Yield (v, m) of one schedule and p."""
    if name in IN_A_V:
        for m in range(2 * p if name == "dualpipe-v" else 1, max_m + 1):
            yield 2, m
        return
    takes_chunks = SCHEDULES[name][0]
    first = 2 if name.startswith("interleaved") else 1
    for v in range(first, max_v + 1) if takes_chunks else (1,):
        for m in range(1, max_m + 1):
            yield v, m


def prove(job: tuple[str, int, int, int, int]) -> tuple[str, int, CorpusStats]:
    """Prove all programs of one schedule, p and prefetch."""
    name, p, max_v, max_m, prefetch = job
    tally = CorpusStats()
    started = time.process_time()
    for v, m in cases(name, p, max_v, max_m):
        check(name, p, v, m, prefetch, tally)
    tally.seconds = time.process_time() - started
    return name, prefetch, tally


@dataclass(frozen=True, kw_only=True)
class Flags:
    """What the command line says."""

    max_p: int = 16
    max_v: int = 4
    max_m: int = 64
    prefetch: tuple[int, ...] = flag((1,), choices=(0, 1, 2))
    all_groups: bool = False
    """Interleaved also with groups of p+1 and 2p."""
    workers: int = os.cpu_count()


def main() -> int:
    """Print the table; return the exit status."""
    options = read_command_line(Flags, description=__doc__.split("\n", 1)[0])
    names = [n for n in SCHEDULES if options.all_groups or n not in LARGER_GROUPS]
    jobs = [
        (name, p, options.max_v, options.max_m, prefetch)
        for p in range(options.max_p, 0, -1)
        for prefetch in options.prefetch
        for name in names
    ]
    tallies = {(name, pre): CorpusStats() for pre in options.prefetch for name in names}
    started = time.monotonic()
    with multiprocessing.Pool(options.workers) as pool:
        for name, prefetch, tally in pool.imap_unordered(prove, jobs):
            tallies[name, prefetch].add(tally)

    print(f"all p <= {options.max_p}, v <= {options.max_v}, m <= {options.max_m}\n")
    head = f"{'schedule':<24}{'prefetch':>9}{'programs':>10}{'steps':>12}{'= formula':>11}"
    print(head + f"{'others/padded':>16}{'failed':>8}{'cpu s':>8}")
    for (name, prefetch), tally in tallies.items():
        row = f"{name:<24}{prefetch:>9}{tally.num_programs:>10}{tally.num_steps:>12}"
        row += f"{tally.num_with_formula:>11}{f'{tally.worst_padded:.3f}':>16}"
        print(row + f"{len(tally.problems):>8}{tally.seconds:>8.1f}")
    problems = [problem for tally in tallies.values() for problem in tally.problems]
    print(f"\n{time.monotonic() - started:.0f} s; {len(problems)} failures")
    for problem in problems[:20]:
        print(problem)
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())
