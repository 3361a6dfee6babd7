"""Print how far every stage of sharding is from one process: `python -m tests.parity.sharding`.

Stages 0, 1, 2 and 3 on every layout of up to 8 ranks with TP {1, 2} (with sequence parallelism),
PP {1, 2} with VPP {1, 2}, DP {2, 4}, 1 or 4 micro batches, tied and untied, and with copies of
the sharded state: 5 steps, compared with one process on the same weights and data. Exits with
status 1 if any error exceeds its named tolerance.
"""

from __future__ import annotations

import argparse
import functools
import sys
import time
import traceback
from itertools import product

from tests.parity.compare import Errors, compare
from tests.parity.layouts import LayoutCase, ModelCase
from tests.parity.table import HEADER, exceeds, row, run_case

serial_run = functools.cache(run_case)

# (replicas, micro batches) -> (samples of a step, samples of a micro batch)
BATCHES = {(2, 1): (8, 4), (2, 4): (8, 1), (4, 1): (8, 2), (4, 4): (16, 1)}


def all_cases() -> list[LayoutCase]:
    """Return every layout; interleaved stages need as many micro batches as stages."""
    cases = []
    grid = product((1, 2), (1, 2), (1, 2), (2, 4), (1, 4), (0, 1, 2, 3), (1, 2))
    for tp, pp, vp, dp, accumulation, stage, instances in grid:
        samples, micro_batch_size = BATCHES[dp, accumulation]
        if tp * pp * dp > 8 or (vp == 2 and (pp == 1 or accumulation == 1)):
            continue
        if instances == 2 and (stage == 0 or dp == 2):
            continue
        cases.append(
            LayoutCase(
                tp=tp,
                sp=tp > 1,
                pp=pp,
                vp=vp,
                dp=dp,
                stage=stage,
                instances=instances,
                samples=samples,
                micro_batch_size=micro_batch_size,
            )
        )
    return cases


def errors_of(layout: LayoutCase, model: ModelCase) -> Errors:
    """Train in a layout and compare with one process."""
    return compare(run_case(layout, model), serial_run(layout.serial, model))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--stage", type=int, choices=(0, 1, 2, 3), help="only this stage")
    parser.add_argument("--max-ranks", type=int, default=8, help="largest world size")
    options = parser.parse_args()
    started, num_cases, failures = time.time(), 0, []
    for model in (ModelCase("gpt2", True, 0.1), ModelCase("llama", False, 0.0)):
        print(f"\n{model}\n{HEADER}", flush=True)
        for layout in all_cases():
            if options.stage not in (None, layout.stage) or layout.world_size > options.max_ranks:
                continue
            num_cases += 1
            try:
                errors = errors_of(layout, model)
            except Exception:
                failures.append(f"{model} | {layout}: {traceback.format_exc(limit=-1)}")
                print(f"{layout!s:<28}  FAILED", flush=True)
                continue
            print(row(layout, errors), flush=True)
            failures += [f"{model} | {layout}: {what}" for what in exceeds(errors)]
    print(f"\n{num_cases} cases in {time.time() - started:.0f} s, {len(failures)} above tolerance")
    print("\n".join(failures))
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
