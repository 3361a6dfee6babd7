"""Print how far context parallelism is from one process: `python -m tests.parity.context`.

TP {1,2} x CP {1,2,4} x PP {1,2} x VPP {1,2} x SP x ZeRO {0,1} of up to 8 ranks, some with ZeRO-3,
every kind of communication; for models with and without documents, window, sink, dropout,
multi-latent attention and multi-token prediction. What is compared, and how, is as in
`tests.parity.table`. Exits with status 1 if any error exceeds its tolerance.
"""

from __future__ import annotations

import argparse
import sys
import time
import traceback
from itertools import product

from tests.parity.compare import compare
from tests.parity.layouts import LayoutCase, ModelCase
from tests.parity.table import FIGURES, exceeds, figures, run_case

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


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--max-ranks", type=int, default=8, help="largest world size")
    parser.add_argument("--models", default="", help="only models whose name begins so")
    options = parser.parse_args()
    started, num_cases, failures = time.time(), 0, []
    for model in MODELS:
        if not str(model).startswith(options.models):
            continue
        print(f"\n{model}\n{'layout':<40}{FIGURES}", flush=True)
        serial = run_case(LayoutCase(), model)
        for layout in context_layouts(options.max_ranks):
            num_cases += 1
            try:
                errors = compare(run_case(layout, model), serial)
            except Exception:
                failures.append(f"{model} | {layout}: {traceback.format_exc(limit=-1)}")
                print(f"{layout!s:<40}  FAILED", flush=True)
                continue
            print(f"{layout!s:<40}{figures(errors)}", flush=True)
            failures += [f"{model} | {layout}: {what}" for what in exceeds(errors)]
    seconds = time.time() - started
    print(f"\n{num_cases} cases in {seconds:.0f} s, {len(failures)} above tolerance")
    print("\n".join(failures))
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
