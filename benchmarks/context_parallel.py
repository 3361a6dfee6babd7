"""How much of a rank's time context parallelism costs: `python -m benchmarks.context_parallel`.

One attention (four heads of width 32, causal, fp32), forward and backward, of 8,192 positions: on
one rank, and on two ranks that share it. Each rank has one thread, so that two ranks have twice the
processor. The figure is the time of one rank over half of the time of one process: 1.0 is ideal.
Best of five. Takes about half a minute on two quiet cores.
"""

from __future__ import annotations

import argparse
import time

import torch

from megatron.core.context_parallel.attention import ContextGroups, attend_over_sequence
from megatron.core.context_parallel.tiles import Visibility
from megatron.core.utils import get_pg_size
from tests.harness.distributed import run_distributed

HEADS, KEY_HEADS, WIDTH, REPEATS = 4, 2, 32, 5


def seconds_of_attention(groups, kind: str, length: int) -> float:
    """Return the best time of forward and backward of this rank's part."""
    local = length // get_pg_size(groups.cp)
    shapes = ((HEADS, WIDTH), (KEY_HEADS, WIDTH), (KEY_HEADS, WIDTH))
    inputs = [torch.randn(local, 1, *shape, requires_grad=True) for shape in shapes]
    best = float("inf")
    for _ in range(REPEATS):
        if groups.cp is not None and get_pg_size(groups.cp) > 1:
            torch.distributed.barrier(groups.cp)
        started = time.perf_counter()
        out = attend_over_sequence(
            *inputs,
            scale=0.2,
            sees=Visibility((-1, 0)),
            kind=kind,
            groups=ContextGroups(groups.cp),
        )
        out.sum().backward()
        best = min(best, time.perf_counter() - started)
    return best


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seq-length", type=int, default=8192)
    options = parser.parse_args()
    (alone,) = run_distributed(seconds_of_attention, 1, "p2p", options.seq_length, timeout_s=300)
    print(f"one rank     {alone:7.3f} s")
    for kind in ("p2p", "all_gather", "a2a"):
        shared = max(
            run_distributed(seconds_of_attention, 2, kind, options.seq_length, timeout_s=300, cp=2)
        )
        print(f"{kind:<12} {shared:7.3f} s   {shared / (alone / 2):5.2f} of half", flush=True)


if __name__ == "__main__":
    main()
