"""Print how far context parallelism is from one process: `python -m tests.parity.context`.

TP {1,2} x CP {1,2,4} x PP {1,2} x VPP {1,2} x SP x ZeRO {0,1} of up to 8 ranks, some with ZeRO-3,
every kind of communication; for models with and without documents, window, sink, dropout,
multi-latent attention and multi-token prediction. By default a sample in which every two values of
two axes meet; `--layouts all` is every product. What is compared, and how, is as in
`tests.parity.table`. Exits with status 1 if any error exceeds its tolerance.
"""

import sys
from itertools import product

from tests.parity.layouts import LayoutCase, ModelCase
from tests.parity.pairwise import pairwise
from tests.parity.table import every_model_in, run_command

MIXED = ["p2p", "all_gather", "a2a"] * 4
"""Another kind in each layer."""
KINDS = ("p2p", "all_gather", "a2a", "a2a+p2p", "mixed")

MODELS = (
    ModelCase("llama", True, 0.0),
    ModelCase("gpt2", True, 0.1, packed=True, sink=True),
    ModelCase("llama", False, 0.1, packed=True, window=5),
    ModelCase("latent", True, 0.1, packed=True, later_tokens=1),
    ModelCase("llama", False, 0.0, later_tokens=2),
)


def context_layouts(max_ranks: int = 8) -> list[LayoutCase]:
    """Every product of the axes that fits, each kind where ranks share a sequence."""
    cases = []
    for tp, cp, pp, stage in product((1, 2), (1, 2, 4), (1, 2), (0, 1)):
        if tp * cp * pp > max_ranks or (stage and cp == 1):
            continue
        for sp in (False, True) if tp > 1 else (False,):
            for vp in (1, 2) if pp > 1 else (1,):
                axes = {"tp": tp, "sp": sp, "pp": pp, "vp": vp, "cp": cp, "stage": stage}
                cases += [LayoutCase(**axes, **kind) for kind in _kinds(cp)]
    for stage, tiled in product((0, 3), (False, True)):
        cases.append(LayoutCase(cp=2, dp=2, tp=2, sp=True, stage=stage, tiled=tiled))
    return cases


def _kinds(cp: int) -> list[dict]:
    if cp == 1:
        return [{}]
    kinds: list[dict] = [{"cp_kind": kind} for kind in KINDS[:3]] + [{"cp_kind": MIXED}]
    if cp == 4:
        kinds.append({"cp_kind": "a2a+p2p", "levels": (2, 2)})
    return kinds


_every = every_model_in(MODELS, context_layouts)
CASES = {
    "all": _every,
    "sample": lambda max_ranks: pairwise(_every(max_ranks), ("tp", "sp", "pp", "vp", "stage")),
}

if __name__ == "__main__":
    sys.exit(run_command(__doc__.splitlines()[0], CASES, default="sample"))
