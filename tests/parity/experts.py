"""Print how far mixture-of-experts training is from one process: `python -m tests.parity.experts`.

TP {1,2} x CP {1,2} x EP {1,2,4} x expert TP {1,2} x PP {1,2} x VPP {1,2} x SP x ZeRO {0,1,3} of up
to 8 ranks, both dispatchers, experts together and one by one; dropless and padded, with capacity,
with groups, bias and shared experts, and by balanced assignment. By default a sample in which every
two values of two axes meet; `--layouts all` is every product. Compared are the loss of every step,
every gradient of the first and last step, the gradient norm, the weights at the end, and what
routers say in every step: visits of each expert, dropped visits, balance losses, biases. Exits with
status 1 if any error exceeds its tolerance.
"""

from __future__ import annotations

import random
import sys
from collections.abc import Iterator, Sequence
from itertools import combinations, product
from typing import Any

from tests.parity.layouts import LayoutCase, ModelCase
from tests.parity.table import run_command

MODELS = (
    ModelCase("llama", True, 0.0, experts="dropless", padded=True),
    ModelCase("gpt2", True, 0.1, experts="capacity"),
    ModelCase("llama", False, 0.1, experts="deepseek", later_tokens=1),
    ModelCase("gpt2", False, 0.0, experts="sinkhorn", packed=True),
)

AXES: dict[str, Sequence[Any]] = {
    "tp": (1, 2),
    "cp": (1, 2),
    "ep": (1, 2, 4),
    "expt_tp": (1, 2),
    "pp": (1, 2),
    "vp": (1, 2),
    "sp": (False, True),
    "stage": (0, 1, 3),
    "dispatcher": ("alltoall", "allgather"),
    "grouped": (True, False),
}


SPLIT_BACKWARDS = (
    LayoutCase(pp=2, schedule="zb-h1", dp=2, ep=2),
    LayoutCase(pp=2, vp=2, schedule="zb-v", tp=2, sp=True, ep=2, expt_tp=1, stage=1, dp=2),
)
"""Schedules in which weight gradients wait."""


def expert_layouts(max_ranks: int = 8) -> list[LayoutCase]:
    """Every product of the axes, with as few data-parallel ranks as the experts need (or two)."""
    cases = []
    for values in product(*AXES.values()):
        axes = dict(zip(AXES, values, strict=True))
        needed = axes["ep"] * axes["expt_tp"]
        shared = axes["tp"] * axes["cp"]
        if (axes["sp"] and axes["tp"] == 1) or (axes["vp"] > 1 and axes["pp"] == 1):
            continue
        if max(needed, shared) % shared or max(needed, shared) % needed:
            continue
        dp = max(needed, shared) // shared
        if axes["stage"] and dp * axes["cp"] == 1:
            dp = 2
        case = LayoutCase(dp=dp, **axes)
        if case.world_size <= max_ranks:
            cases.append(case)
    return cases


def pairwise(cases: Sequence[LayoutCase], seed: int = 1) -> list[LayoutCase]:
    """Return few of the cases in which every two values of two axes meet, where any case has both.

    Greedy, over a shuffled order: next comes the case that has the most pairs not yet seen.
    """
    shuffled = list(cases)
    random.Random(seed).shuffle(shuffled)
    left = {case: set(_pairs(case)) for case in shuffled}
    missing = set().union(*left.values())
    chosen = []
    while missing:
        best = max(shuffled, key=lambda case: len(left[case] & missing))
        chosen.append(best)
        missing -= left[best]
    return chosen


def _pairs(case: LayoutCase) -> Iterator[tuple]:
    for first, second in combinations(AXES, 2):
        yield first, getattr(case, first), second, getattr(case, second)


LAYOUTS = {
    "all": expert_layouts,
    "sample": lambda max_ranks: [*pairwise(expert_layouts(max_ranks)), *SPLIT_BACKWARDS],
}

if __name__ == "__main__":
    sys.exit(run_command(__doc__.splitlines()[0], MODELS, LAYOUTS, default="sample"))
