"""Print how far every stage of sharding is from one process: `python -m tests.parity.sharding`.

Stages 0, 1, 2 and 3 on every layout of up to 8 ranks with TP {1, 2} (with sequence parallelism),
PP {1, 2} with VPP {1, 2}, DP {2, 4}, 1 or 4 micro batches, tied and untied, and with copies of
the sharded state: 5 steps, compared with one process on the same weights and data. Exits with
status 1 if any error exceeds its named tolerance.
"""

import sys
from itertools import product

from tests.parity.layouts import LayoutCase, ModelCase
from tests.parity.table import every_model_in, run_command

MODELS = (ModelCase("gpt2", True, 0.1), ModelCase("llama", False, 0.0))

# (replicas, micro batches) -> (samples of a step, samples of a micro batch)
BATCHES = {(2, 1): (8, 4), (2, 4): (8, 1), (4, 1): (8, 2), (4, 4): (16, 1)}


def all_cases(max_ranks: int = 8) -> list[LayoutCase]:
    """Return every layout; interleaved stages need as many micro batches as stages."""
    cases = []
    grid = product((1, 2), (1, 2), (1, 2), (2, 4), (1, 4), (0, 1, 2, 3), (1, 2))
    for tp, pp, vp, dp, accumulation, stage, instances in grid:
        samples, micro_batch_size = BATCHES[dp, accumulation]
        if tp * pp * dp > max_ranks or (vp == 2 and (pp == 1 or accumulation == 1)):
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


if __name__ == "__main__":
    cases = {"all": every_model_in(MODELS, all_cases)}
    sys.exit(run_command(__doc__.splitlines()[0], cases))
