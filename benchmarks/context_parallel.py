"""Overhead of context parallelism for a rank: `python -m benchmarks.context_parallel`.

One attention (four heads of width 32, causal, fp32), forward and backward, of 8,192 positions runs
on one rank, and on two ranks that share it. Each rank has one thread, so two ranks have twice the
processor time. The figure is the time of the ranks over half of the time of one process: 1.0 is
ideal. A line of two independent processes, each with half of the heads, shows the limit of the
machine. The processor time of the slowest rank is printed too; the rest of its time is waiting.
Best of five. Takes about half a minute on two quiet cores.
"""

from __future__ import annotations

import time
from dataclasses import dataclass

import torch

from megatron.core.context_parallel.attention import (
    ContextParallelGroups,
    context_parallel_attention,
)
from megatron.core.kernels.attention_options import AttentionOptions
from megatron.core.kernels.block_mask import MaskSpec
from megatron.core.settings.command_line import read_command_line
from tests.harness.distributed import run_distributed

HEADS, KEY_HEADS, WIDTH, REPEATS = 4, 2, 32, 5


def seconds_of_attention(groups, kind: str, length: int, share: int = 1) -> tuple[float, float]:
    """Return the best time, and processor time, of forward and backward of this rank's part.

    Args:
        share: divisor of the number of heads.
    """
    local = length // groups.cp.size()
    heads, key_heads = HEADS // share, KEY_HEADS // share
    shapes = ((heads, WIDTH), (key_heads, WIDTH), (key_heads, WIDTH))
    inputs = [torch.randn(local, 1, *shape, requires_grad=True) for shape in shapes]
    best = (float("inf"), float("inf"))
    for _ in range(REPEATS):
        if torch.distributed.is_initialized():
            torch.distributed.barrier()
        started, used = time.perf_counter(), time.process_time()
        out = context_parallel_attention(
            *inputs,
            AttentionOptions(0.2, MaskSpec((-1, 0))),
            cp_comm_type=kind,
            groups=ContextParallelGroups(groups.cp),
        )
        out.sum().backward()
        best = min(best, (time.perf_counter() - started, time.process_time() - used))
    return best


@dataclass(frozen=True, kw_only=True)
class Flags:
    """Flags of the command line."""

    seq_length: int = 8192


def main() -> None:
    """Measure and print."""
    options = read_command_line(Flags, description=__doc__.splitlines()[0])
    length = options.seq_length
    ((alone, used),) = run_distributed(seconds_of_attention, 1, "p2p", length, timeout_s=300)
    print(f"one rank     {alone:7.3f} s   processor {used:7.3f} s")
    half = alone / 2
    for name in ("apart", "p2p", "all_gather", "a2a"):
        layout = {} if name == "apart" else {"cp": 2}
        kind, share = ("p2p", 2) if name == "apart" else (name, 1)
        found = run_distributed(
            seconds_of_attention, 2, kind, length, share, timeout_s=300, **layout
        )
        shared, used = max(found)
        print(
            f"{name:<12} {shared:7.3f} s   processor {used:7.3f} s   {shared / half:5.2f} of half",
            flush=True,
        )


if __name__ == "__main__":
    main()
