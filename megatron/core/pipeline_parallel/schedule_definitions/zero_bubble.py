"""ZB-H1: weight gradients are deferred to times when a rank would otherwise be idle.

"Zero Bubble Pipeline Parallelism", section 2.2, arXiv:2401.10241. A backward is split: the previous
stage waits for the input gradient, but no stage waits for the weight gradient. The bubble is
(p-1)(F+I-W), a third of the bubble of 1F1B if F = I = W. Every rank keeps the activations of at
most p micro batches, as many as the first rank of 1F1B.
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
    """Return the compute steps of one rank: 1F1B with weight gradients delayed by `rank` steps.

    Rank r of 1F1B keeps p-r micro batches. With weight gradients delayed by r, every rank needs the
    memory of the first rank, and r weight gradients remain to fill the wait at the end.
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
