"""Print how far mixture-of-experts training is from one process: `python -m tests.parity.experts`.

TP {1,2} x SP x EP {1,2,4} x expert TP {1,2} x PP {1,2} x VPP {1,2} x ZeRO {0,1,3} of up to 8 ranks,
a sequence on 1, 2 or 4 of them by every kind of communication, both dispatchers, experts together
and one by one; models with dropless and padded experts, capacity and sinks, groups, bias, shared
experts and later tokens, balanced assignment of documents, multi-latent attention over documents.
By default a sample in which every two values of two axes meet, models counting as an axis; no claim
is made for three at a time. `--layouts all` is every product. Compared are the loss of every step,
every gradient of the first and last step, the gradient norm, the weights at the end, and what
routers say in every step: tokens of each expert, dropped tokens, balance losses, biases. Exits with
status 1 if any error exceeds its tolerance.
"""

import sys
from collections.abc import Sequence
from itertools import product
from typing import Any

from tests.parity.layouts import LayoutCase, ModelCase
from tests.parity.pairwise import pairwise
from tests.parity.table import every_model_in, run_command

MODELS = (
    ModelCase("llama", True, 0.0, experts="dropless", padded=True),
    ModelCase("gpt2", True, 0.1, experts="capacity", sink=True),
    ModelCase("llama", False, 0.1, experts="deepseek", later_tokens=1),
    ModelCase("gpt2", False, 0.0, experts="sinkhorn", packed=True),
    ModelCase("latent", True, 0.1, experts="deepseek", packed=True, later_tokens=1),
)

SEQUENCES: tuple[dict[str, Any], ...] = (
    {},
    {"cp": 2, "cp_kind": "p2p"},
    {"cp": 2, "cp_kind": "all_gather"},
    {"cp": 2, "cp_kind": "a2a"},
    {"cp": 4, "cp_kind": ["p2p", "all_gather", "a2a", "p2p"]},
    {"cp": 4, "cp_kind": "a2a+p2p", "levels": (2, 2)},
)
"""How many ranks share a sequence, and how."""

AXES: dict[str, Sequence[Any]] = {
    "tp": (1, 2),
    "sp": (False, True),
    "ep": (1, 2, 4),
    "expt_tp": (1, 2),
    "pp": (1, 2),
    "vp": (1, 2),
    "stage": (0, 1, 3),
    "dispatcher": ("alltoall", "allgather"),
    "grouped": (True, False),
}

OTHER_SCHEDULES = (
    (MODELS[0], LayoutCase(pp=2, schedule="zb-h1", dp=2, ep=2)),
    (MODELS[1], LayoutCase(pp=2, vp=2, schedule="dualpipe-v", cp=2, ep=2)),
    (MODELS[2], LayoutCase(pp=2, vp=2, schedule="zb-v", tp=2, sp=True, ep=2, stage=1, dp=2)),
    (MODELS[0], LayoutCase(pp=2, tp=2, sp=True, dp=2, ep=4, expt_tp=1, combined=True)),
    (MODELS[2], LayoutCase(dp=2, ep=2, expt_tp=2, tp=2, combined=True, stage=1)),
    (MODELS[2], LayoutCase(pp=2, cp=2, dp=2, ep=4, combined=True, stage=2)),
    (MODELS[4], LayoutCase(dp=2, ep=2, combined=True)),
    (MODELS[0], LayoutCase(tp=2, sp=True, dp=2, ep=4, capacity=4.0)),
    (MODELS[1], LayoutCase(cp=2, dp=2, ep=4, capacity=4.0, grouped=False)),
    (MODELS[2], LayoutCase(pp=2, dp=2, ep=2, expt_tp=2, tp=2, combined=True, capacity=2.0)),
    (MODELS[4], LayoutCase(dp=4, ep=4, stage=3, capacity=4.0)),
    (MODELS[0], LayoutCase(dp=4, ep=2, combined=True, stage=3, samples=16)),
    (MODELS[2], LayoutCase(pp=2, dp=4, ep=2, combined=True, stage=3, samples=16)),
    (MODELS[1], LayoutCase(pp=2, tp=2, sp=True, dp=2, ep=2, combined=True, stage=3)),
    (MODELS[1], LayoutCase(pp=2, vp=2, schedule="dualpipe-v", dp=2, ep=2, combined=True)),
    (MODELS[0], LayoutCase(pp=2, vp=2, dp=2, ep=2, combined=True)),
    (MODELS[1], LayoutCase(pp=2, vp=2, tp=2, sp=True, dp=2, ep=2, combined=True, stage=3)),
    (MODELS[2], LayoutCase(pp=2, vp=2, cp=2, dp=2, ep=4, combined=True, stage=2, group=3)),
    (MODELS[3], LayoutCase(pp=2, vp=2, dp=4, ep=2, samples=20, combined=True, stage=1)),
    (
        MODELS[4],
        LayoutCase(pp=4, vp=2, dp=2, ep=2, samples=18, letters="Et||t|t|t|||mL", combined=True),
    ),
    (MODELS[2], LayoutCase(pp=2, vp=2, schedule="zb-v", dp=4, ep=2, samples=16, stage=2)),
    (
        MODELS[2],
        LayoutCase(
            pp=2, vp=2, schedule="dualpipe-v", dp=4, ep=2, samples=16, combined=True, stage=3
        ),
    ),
)
"""Schedules in which weight gradients wait, and in which forwards and backwards take turns."""


def expert_layouts(max_ranks: int = 8) -> list[LayoutCase]:
    """Every product of the axes, with as few data-parallel ranks as the experts need (or two)."""
    cases = []
    for sequence, *values in product(SEQUENCES, *AXES.values()):
        axes = dict(zip(AXES, values, strict=True)) | sequence
        needed = axes["ep"] * axes["expt_tp"]
        shared = axes["tp"] * axes.get("cp", 1)
        if (axes["sp"] and axes["tp"] == 1) or (axes["vp"] > 1 and axes["pp"] == 1):
            continue
        if max(needed, shared) % shared or max(needed, shared) % needed:
            continue
        dp = max(needed, shared) // shared
        if axes["stage"] and shared == axes["tp"] and dp == 1:
            dp = 2
        case = LayoutCase(dp=dp, **axes)
        if case.world_size <= max_ranks:
            cases.append(case)
    return cases


_every = every_model_in(MODELS, expert_layouts)
CASES = {
    "all": _every,
    "sample": lambda max_ranks: [
        *pairwise(_every(max_ranks), AXES),
        *(case for case in OTHER_SCHEDULES if case[1].world_size <= max_ranks),
    ],
}

if __name__ == "__main__":
    sys.exit(run_command(__doc__.splitlines()[0], CASES, default="sample"))
