r"""Cost of one training step on one device, against a plain PyTorch model and Hugging Face's.

    python -m benchmarks.single_device                        # both families, fp32 and bf16
    python -m benchmarks.single_device --family llama --dtype bf16 --breakdown

On a GPU, choose a larger model:

    python -m benchmarks.single_device --family llama --dtype bf16 --layers 16 --hidden 2048 \
        --heads 16 --kv-heads 4 --ffn 5632 --sequence 4096 --batch 4

On the CPU the cost is processor time of one thread, so that other programs have little effect; the
candidates alternate in one process, and the median counts. On a GPU the cost is wall time between
synchronisations. The same run measures the rate of a plain matrix product between the steps, and
prints the share of this rate that the model's own matrix products reach.
"""

from __future__ import annotations

import json
import statistics
import time
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from benchmarks.candidates import CANDIDATES, FAMILIES, Step, model_flops, sizes_of
from benchmarks.plain_gpt import Sizes
from megatron.core.foundation.device import current_device, synchronize
from megatron.core.settings.command_line import read_command_line
from megatron.core.settings.flags import flag

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}


@dataclass(frozen=True, kw_only=True)
class Flags:
    """Flags of the command line."""

    family: tuple[str, ...] = flag(tuple(FAMILIES), choices=FAMILIES)
    dtype: tuple[str, ...] = flag(tuple(DTYPES), choices=DTYPES)
    sequence: int = 512
    batch: int = 2
    """Sequences per step."""
    vocabulary: int = 32000
    layers: int | None = None
    """Size of the model."""
    hidden: int | None = None
    """Size of the model."""
    heads: int | None = None
    """Size of the model."""
    kv_heads: int | None = None
    """Size of the model."""
    ffn: int | None = None
    """Size of the model."""
    rounds: int = 5
    optimizer: bool = False
    """Include an AdamW step."""
    only: tuple[str, ...] | None = flag(None, choices=CANDIDATES)
    breakdown: bool = False
    """Profile by operator instead."""
    rows: int = 18
    """Lines per breakdown."""
    json: str | None = None
    """Write the figures to this file."""


def chosen_sizes(family: str, options: Flags) -> Sizes:
    """Return the benchmark's sizes, with the changes of the command line."""
    changed = {
        "sequence": options.sequence,
        "vocab_size": options.vocabulary,
        "num_layers": options.layers,
        "hidden_size": options.hidden,
        "num_heads": options.heads,
        "num_kv_heads": options.kv_heads,
        "ffn_size": options.ffn,
    }
    if family == "gpt2":
        changed["num_kv_heads"] = options.heads
    return sizes_of(family, **{name: n for name, n in changed.items() if n is not None})


def clock_of(device: torch.device) -> Callable[[], float]:
    """Return a clock in seconds: processor time on the CPU, synchronised wall time on a GPU."""
    if device.type == "cpu":
        return time.process_time

    def wall() -> float:
        synchronize()
        return time.perf_counter()

    return wall


def matmul_step(dtype: torch.dtype, device: torch.device) -> tuple[Step, float]:
    """Return a square matrix product and its FLOPs."""
    size = 1024 if device.type == "cpu" else 8192
    a, b = (torch.randn(size, size, dtype=dtype, device=device) for _ in range(2))

    def step() -> float:
        torch.mm(a, b)
        return 0.0

    return step, 2.0 * size**3


def take_turns(steps: dict[str, Step], rounds: int, clock: Callable[[], float]) -> dict[str, list]:
    """Run every step once per round, after one round that does not count."""
    times: dict[str, list[float]] = defaultdict(list)
    for turn in range(rounds + 1):
        for name, step in steps.items():
            begin = clock()
            step()
            elapsed = clock() - begin
            if turn:
                times[name].append(elapsed)
    return times


def measure(family: str, dtype_name: str, options: Flags) -> dict[str, Any]:
    """Time all candidates for one family and dtype, and return the figures."""
    device, dtype = current_device(), DTYPES[dtype_name]
    sizes = chosen_sizes(family, options)
    torch.manual_seed(0)
    steps = {
        name: make(family, sizes, options.batch, dtype, device, options.optimizer)
        for name, make in CANDIDATES.items()
        if options.only is None or name in options.only
    }
    matmul, matmul_flops = matmul_step(dtype, device)
    times = take_turns({**steps, "matmul": matmul}, options.rounds, clock_of(device))
    rate = matmul_flops / statistics.median(times.pop("matmul"))
    flops = model_flops(family, sizes, options.batch)
    medians = {name: statistics.median(values) for name, values in times.items()}
    return {
        "family": family,
        "dtype": dtype_name,
        "matmul_flops_per_s": rate,
        "model_flops": flops,
        "seconds": medians,
        "spread": {name: (max(v) - min(v)) / statistics.median(v) for name, v in times.items()},
        "share_of_matmul": {name: flops / t / rate for name, t in medians.items()},
        "tokens_per_s": {name: options.batch * sizes.sequence / t for name, t in medians.items()},
    }


def print_table(results: list[dict[str, Any]]) -> None:
    """Print one line per candidate, with its cost relative to the cheapest other candidate."""
    head = f"{'model':<14}{'dtype':<6}{'candidate':<15}{'s/step':>8}{'spread':>8}"
    print(head + f"{'tokens/s':>10}{'of matmul':>11}{'vs cheapest other':>19}")
    for result in results:
        seconds = result["seconds"]
        for name, t in seconds.items():
            others = [other for n, other in seconds.items() if n != name]
            ratio = f"{t / min(others):.3f}x" if others else "-"
            print(
                f"{result['family']:<14}{result['dtype']:<6}{name:<15}{t:>8.3f}"
                f"{result['spread'][name]:>8.0%}{result['tokens_per_s'][name]:>10.0f}"
                f"{result['share_of_matmul'][name]:>11.2f}{ratio:>19}"
            )
        print(f"{'':<20}matmul {result['matmul_flops_per_s'] / 1e9:.0f} GFLOP/s")


def print_breakdown(family: str, dtype_name: str, options: Flags) -> None:
    """Print the time of each candidate's step by operator."""
    device, dtype = current_device(), DTYPES[dtype_name]
    sizes = chosen_sizes(family, options)
    activities = [torch.profiler.ProfilerActivity.CPU]
    if device.type == "cuda":
        activities.append(torch.profiler.ProfilerActivity.CUDA)
    for name, make in CANDIDATES.items():
        if options.only is not None and name not in options.only:
            continue
        step = make(family, sizes, options.batch, dtype, device, options.optimizer)
        step()
        with torch.profiler.profile(activities=activities) as profile:
            step()
        key = "self_cpu_time_total" if device.type == "cpu" else "self_device_time_total"
        rows = sorted(profile.key_averages(), key=lambda e: -getattr(e, key))
        total = sum(getattr(e, key) for e in rows)
        print(f"\n{name}, {family}, {dtype_name}: {total / 1e3:.0f} ms in operators")
        for event in rows[: options.rows]:
            part = getattr(event, key)
            print(f"  {part / 1e3:9.1f} ms {part / total:6.1%} {event.count:6d}x  {event.key}")


def main() -> None:
    """Parse the command line, measure, print."""
    options = read_command_line(Flags, description=__doc__)
    torch.set_num_threads(1)
    cases = [(family, dtype) for family in options.family for dtype in options.dtype]
    if options.breakdown:
        for family, dtype in cases:
            print_breakdown(family, dtype, options)
        return
    results = [measure(family, dtype, options) for family, dtype in cases]
    print_table(results)
    if options.json:
        with open(options.json, "w") as file:
            json.dump(results, file, indent=1)


if __name__ == "__main__":
    main()
