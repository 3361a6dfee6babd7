"""The planned memory of drawn layouts of small models, against torch's CPU allocator.

    python -m tests.parity.planned_memory --layouts 50 --seed 1

Each layout trains two steps on gloo. Every rank is compared: the most it has at a time in its
second step, and what it has between steps. `tests/distributed/training/test_planned_memory.py` has
a few layouts.
"""

import random
import sys
from dataclasses import dataclass

import numpy as np

from megatron.core.foundation.errors import ConfigError
from megatron.core.settings.command_line import read_command_line
from megatron.training.setup.traced_memory import trace_rank
from tests.harness.distributed import run_distributed
from tests.harness.resolved_run import run_of
from tests.parity.planned_memory_case import SCRIPT, measure

TOLERANCE = 0.03


@dataclass(frozen=True, kw_only=True)
class Flags:
    """What the command line says."""

    layouts: int = 50
    seed: int = 1
    words: str = ""
    """Flags of one layout in place of drawn ones, after its number of ranks: "2 --bf16 ..."."""


@dataclass(frozen=True)
class Layout:
    """A model and how it is split."""

    world_size: int
    words: str


def draw_layout(draw: random.Random) -> Layout:
    """Return a layout of a small model, which a rule of a run may still refuse."""
    world_size = draw.choice((1, 2, 2, 2, 4, 4))
    sizes = {"tensor-model": 1, "pipeline-model": 1, "context": 1}
    left = world_size
    while left > 1:
        axis = draw.choice((*sizes, None))
        if axis:
            sizes[axis] *= 2
        left //= 2
    data = world_size // np.prod(list(sizes.values()))
    pipeline = sizes["pipeline-model"]
    micro = draw.choice((1, 2))
    layers = 4 if pipeline < 4 else 8
    words = [
        f"--num-layers {layers} --hidden-size {draw.choice((128, 192, 256))}",
        f"--num-attention-heads 4 --seq-length {draw.choice((128, 256))} --vocab-size 512",
        "--hidden-dropout 0 --attention-dropout 0",
        f"--micro-batch-size {micro} --global-batch-size {micro * data * draw.choice((2, 4))}",
    ]
    words += [f"--{axis}-parallel-size {size}" for axis, size in sizes.items() if size > 1]
    if sizes["tensor-model"] > 1 and draw.random() < 0.6:
        words.append("--sequence-parallel")
    # From the initial scale of 2**32 the first steps overflow and update nothing.
    fp16 = "--fp16 --initial-loss-scale 1024"
    words += draw.choice(((), ("--bf16",), ("--bf16",), (fp16,)))
    words += draw.choice(((), ("--swiglu",)))
    words += draw.choice(((), ("--num-query-groups 2",)))
    words += draw.choice(((), ("--normalization RMSNorm --disable-bias-linear",)))
    words += draw.choice(((), ("--untie-embeddings-and-output-weights",)))
    words += _experts(draw, world_size // pipeline // sizes["context"])
    words += _sharding(draw, pipeline)
    words += _recomputation(draw)
    if pipeline > 1:
        words += _schedule(draw, pipeline)
    return Layout(world_size, " ".join(words))


def _experts(draw: random.Random, ranks: int) -> list[str]:
    if draw.random() < 0.65:
        return []
    split = draw.choice([size for size in (1, 2, 4) if size <= ranks])
    return [
        f"--num-experts 4 --moe-router-topk {draw.choice((1, 2))}",
        f"--expert-model-parallel-size {split}",
        f"--moe-token-dispatcher-type {draw.choice(('alltoall', 'allgather'))}",
    ]


def _sharding(draw: random.Random, pipeline: int) -> list[str]:
    strategies = ("", "", "optim", "optim", "optim_grads", "optim_grads_params")
    strategy = draw.choice(strategies if pipeline == 1 else strategies[:4])
    return [f"--data-parallel-sharding-strategy {strategy}"] if strategy else []


def _recomputation(draw: random.Random) -> list[str]:
    full = "--recompute-granularity full --recompute-method"
    selective = "--recompute-granularity selective --recompute-modules"
    return [
        draw.choice(
            (
                "",
                "",
                f"{full} uniform --recompute-num-layers {draw.choice((1, 2))}",
                f"{full} block --recompute-num-layers 1",
                f"{selective} core_attn",
                f"{selective} layernorm",
                f"{selective} mlp",
            )
        )
    ]


def _schedule(draw: random.Random, pipeline: int) -> list[str]:
    return [
        draw.choice(
            (
                "",
                "--num-virtual-stages-per-pipeline-rank 2",
                "--num-virtual-stages-per-pipeline-rank 2",
                "--pipeline-schedule zb-h1",
                "--pipeline-schedule gpipe",
            )
        )
    ]


@dataclass(frozen=True)
class Compared:
    """Planned over counted bytes, - 1, of each rank."""

    peak: list[float]
    idle: list[float]
    counted_mib: float
    """The most of any rank."""


def compare(layout: Layout) -> Compared | str:
    """Return how far the plan of each rank is off, or why the layout is refused."""
    counted = run_distributed(measure, layout.world_size, layout.words, timeout_s=300.0)
    if isinstance(counted[0], str):
        return counted[0]
    run = run_of(layout.words, layout.world_size)
    peak, idle = [], []
    for rank, found in enumerate(counted):
        trace = trace_rank(run, SCRIPT, rank)
        peak.append(trace.peak.num_bytes / found.peak - 1)
        idle.append(trace.idle / found.idle - 1)
    return Compared(peak, idle, max(found.peak for found in counted) / 2**20)


def drawn(count: int, seed: int) -> list[Layout]:
    """Return so many layouts that the rules of a run allow."""
    draw, found = random.Random(seed), list[Layout]()
    while len(found) < count:
        layout = draw_layout(draw)
        try:
            run_of(layout.words, layout.world_size)
        except ConfigError:
            continue
        found.append(layout)
    return found


def main() -> int:
    """Compare, print a line for each layout, and return whether all are within the tolerance."""
    flags = read_command_line(Flags, description=__doc__)
    if flags.words:
        world_size, _, words = flags.words.partition(" ")
        layouts = [Layout(int(world_size), words)]
    else:
        layouts = drawn(flags.layouts, flags.seed)
    worst = []
    for layout in layouts:
        found = compare(layout)
        if isinstance(found, str):
            print(f"refused: {found}\n    {layout.world_size} {layout.words}", flush=True)
            continue
        most = max(map(abs, (*found.peak, *found.idle)))
        worst.append(most)
        peaks = " ".join(f"{100 * error:+.1f}" for error in found.peak)
        idles = " ".join(f"{100 * error:+.1f}" for error in found.idle)
        mark = "  " if most <= TOLERANCE else "!!"
        print(
            f"{mark} {found.counted_mib:6.1f} MiB, peak {peaks} %, between steps {idles} %:"
            f" {layout.world_size} {layout.words}",
            flush=True,
        )
    within = sum(error <= TOLERANCE for error in worst)
    print(
        f"{within} of {len(worst)} within {100 * TOLERANCE:.0f} %; median of the worst rank"
        f" {100 * np.median(worst):.2f} %, worst {100 * max(worst):.2f} %"
    )
    return int(within < len(worst))


if __name__ == "__main__":
    sys.exit(main())
