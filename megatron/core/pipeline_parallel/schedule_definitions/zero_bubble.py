"""ZB-H1: weight gradients wait until a rank would otherwise idle.

"Zero Bubble Pipeline Parallelism", section 2.2, arXiv:2401.10241. A backward is cut in two: the
input gradient, for which the previous stage waits, and the weight gradient, for which nobody
does. Bubble (p-1)(F+I-W), a third of 1F1B's where F = I = W; every rank keeps at most the
activations of p micro batches, as the first rank of 1F1B does.
"""

from __future__ import annotations

from megatron.core.pipeline_parallel.instructions import (
    FORWARD,
    INPUT_GRAD,
    WEIGHT_GRAD,
    Orders,
    Placement,
    Step,
)
from megatron.core.pipeline_parallel.schedule import Schedule, register_schedule


def zero_bubble_h1_order(p: int, rank: int, m: int) -> list[Step]:
    """Return the compute steps of one rank: 1F1B whose weight gradients come `rank` later.

    Rank r of 1F1B keeps p-r micro batches. Delaying its weight gradients by r uses what the
    first rank has to have anyway, and leaves r of them to fill the wait at the end.
    """
    warm_up = min(p - rank - 1, m)
    steps = [Step(FORWARD, microbatch, 0) for microbatch in range(warm_up)]
    for microbatch in range(m):
        if warm_up + microbatch < m:
            steps.append(Step(FORWARD, warm_up + microbatch, 0))
        steps.append(Step(INPUT_GRAD, microbatch, 0))
        if microbatch >= rank:
            steps.append(Step(WEIGHT_GRAD, microbatch - rank, 0))
    steps.extend(Step(WEIGHT_GRAD, microbatch, 0) for microbatch in range(max(m - rank, 0), m))
    return steps


def zero_bubble_h1_orders(p: int, m: int) -> Orders:
    """Return the ZB-H1 order of all ranks."""
    return Orders("zb-h1", Placement(p), m, False, lambda rank: zero_bubble_h1_order(p, rank, m))


SCHEDULE = register_schedule(
    Schedule(
        name="zb-h1",
        title="ZB-H1",
        orders=lambda plan: zero_bubble_h1_orders(plan.pipeline_size, plan.num_microbatches),
        splits_backward=True,
    )
)
