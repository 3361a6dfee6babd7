"""Stage D: rates of collectives, on a machine with several GPUs.

    python -m benchmarks.gpu.collectives                # all GPUs of this machine
    python -m benchmarks.gpu.collectives --rehearse     # two ranks on the CPU, by gloo

GB/s are the bytes that a rank must send, divided by the time of the collective.
"""

from __future__ import annotations

import json
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed as dist

from benchmarks.gpu.forks import Case, Outcome, Run, first_errors, run_cases
from benchmarks.gpu.small_models import choose_cpu
from megatron.core.foundation import device
from megatron.core.settings.command_line import read_command_line
from megatron.core.topology.group import Group
from megatron.core.transport import collectives

MESSAGES = tuple(2**n for n in (16, 20, 24, 28))
"""Bytes of the whole tensor."""
TINY = (4096,)
_CALLS, _ROUNDS = 5, 3
_LIMIT_S = 12


def seconds_of(call: Callable[[], object]) -> float:
    """Return the median seconds of a call, among several that are queued together."""
    call()
    found = []
    for _ in range(_ROUNDS):
        device.synchronize()
        begin = time.perf_counter()
        for _ in range(_CALLS):
            call()
        device.synchronize()
        found.append((time.perf_counter() - begin) / _CALLS)
    return statistics.median(found)


def rows(group: Group, messages: Sequence[int]) -> Iterator[dict[str, object]]:
    """Yield the rate of each collective on `group`, in bf16."""
    ranks = group.size()
    share = (ranks - 1) / ranks
    for count in messages:
        whole = torch.zeros(count // 2 // ranks * ranks, 1, device=device.current_device())
        whole = whole.to(torch.bfloat16)
        piece = whole[: len(whole) // ranks].clone()
        calls: dict[str, tuple[Callable[[], object], float]] = {
            "all-reduce": (lambda x=whole: collectives.all_reduce(x, group), 2 * share),
            "all-gather": (lambda x=piece: collectives.all_gather(x, group), share),
            "reduce-scatter": (lambda x=whole: collectives.reduce_scatter(x, group), share),
            "all-to-all": (lambda x=whole: collectives.all_to_all(x, group), share),
        }
        for name, (call, sent) in calls.items():
            seconds = seconds_of(call)
            yield {"ranks": ranks, "collective": name, "bytes": count,
                   "us": round(1e6 * seconds, 1),
                   "GB/s": float(f"{1e-9 * sent * count / seconds:.4g}")}  # fmt: skip


def main_of_rank() -> None:
    """Measure as one rank; rank 0 prints."""
    rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    device.set_local_device(rank)
    dist.init_process_group(device.communication_backend(), rank=rank, world_size=size)
    group = dist.new_group(list(range(size)))
    for row in rows(group, TINY if device.device_type() == "cpu" else MESSAGES):
        if rank == 0:
            print(f"ROW: {json.dumps(row)}")
    dist.destroy_process_group()


@dataclass(frozen=True, kw_only=True)
class Flags:
    """Flags of the command line."""

    rehearse: bool = False
    """Run two ranks on the CPU."""


def main(argv: Sequence[str] | None = None) -> int:
    """Measure the collectives over all GPUs."""
    options = read_command_line(
        Flags, argv, prog="python -m benchmarks.gpu.collectives", description=__doc__
    )
    if options.rehearse:
        choose_cpu()
    # Counted by the driver's library, so that forks can still use CUDA.
    number = 2 if options.rehearse else torch.accelerator.device_count()
    if number < 2:
        print(f'ROW: {{"collectives": "not measured", "GPUs": {number}}}')
        return 0
    problems = []

    def show(outcome: Outcome) -> None:
        print(outcome.log, flush=True)
        if outcome.problem:
            problems.append(outcome.problem)
            row = {"collectives": outcome.problem, "errors": list(first_errors(outcome.log))}
            print(f"ROW: {json.dumps(row)}", flush=True)

    case = Case(name="collectives", runs=(Run(words=(), num_ranks=number),))
    with tempfile.TemporaryDirectory() as folder:
        run_cases([case], Path(folder), main=main_of_rank, ranks_at_once=number,
                  limit_s=_LIMIT_S, whole_limit_s=_LIMIT_S, on_end=show)  # fmt: skip
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())
