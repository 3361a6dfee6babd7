"""1F1B: after a warm-up, every rank alternates one forward and one backward.

"PipeDream: Generalized Pipeline Parallelism for DNN Training", section 3.2 (arXiv:1806.03377),
in the flushing form of "Memory-Efficient Pipeline-Parallel DNN Training", section 3.1
(arXiv:2006.09503). Same bubble as GPipe, (p-1)/(m+p-1), but rank r keeps the activations of at
most p-r micro batches instead of m.

With `overlap_f_b`, each rank runs extra warm-up forwards, so that the forward and the backward of a
pair belong to different micro batches: a gradient now arrives after the next rank has computed a
pair instead of a backward. Rank r then keeps up to 2(p-r) micro batches. The pairs are from
"DeepSeek-V3 Technical Report", section 3.2.1 (arXiv:2412.19437).
"""

from __future__ import annotations

from megatron.core.pipeline_parallel.instructions import BACKWARD, FORWARD, Orders, Placement, Step
from megatron.core.pipeline_parallel.schedule import Schedule, StepPlan, register_schedule
from megatron.core.pipeline_parallel.schedule_definitions.interleaved import interleaved_orders


def one_f_one_b_order(p: int, rank: int, m: int, *, overlap_f_b: bool = False) -> list[Step]:
    """Return the compute steps of one rank: warm-up, steady state, cool-down."""
    warm_up = _warm_up(p, rank, m, overlap_f_b)
    steps = [Step(FORWARD, microbatch, 0) for microbatch in range(warm_up)]
    for microbatch in range(warm_up, m):
        steps.append(Step(FORWARD, microbatch, 0))
        steps.append(Step(BACKWARD, microbatch - warm_up, 0))
    steps.extend(Step(BACKWARD, microbatch, 0) for microbatch in range(m - warm_up, m))
    return steps


def one_f_one_b_orders(p: int, m: int, *, overlap_f_b: bool = False) -> Orders:
    """Return the 1F1B order of all ranks.

    Args:
        overlap_f_b: overlap the forward and the backward of the steady state.
    """

    def pairs(rank: int) -> range:
        warm_up = _warm_up(p, rank, m, overlap_f_b)
        return range(warm_up, 2 * m - warm_up, 2)

    return Orders(
        "1f1b",
        Placement(p),
        m,
        False,
        lambda rank: one_f_one_b_order(p, rank, m, overlap_f_b=overlap_f_b),
        pairs=pairs if overlap_f_b else None,
    )


def _warm_up(p: int, rank: int, m: int, overlap_f_b: bool) -> int:
    """Return the number of warm-up forwards.

    This is the distance from this rank to the last one, so that the first gradient arrives when the
    warm-up ends; with p = 1 the order is F0 B0 F1 B1 ... Pairs need twice the distance and one
    more; with p = 1 the order is F0, F1 B0, F2 B1 ...
    """
    way = p - rank - 1
    return min(2 * way + 1 if overlap_f_b else way, m)


def _orders(plan: StepPlan) -> Orders:
    p, v, m = plan.pipeline_size, plan.num_chunks, plan.num_microbatches
    if v > 1:
        return interleaved_orders(p, m, v, plan.group_size, overlap_f_b=plan.overlap_f_b)
    return one_f_one_b_orders(p, m, overlap_f_b=plan.overlap_f_b)


SCHEDULE = register_schedule(
    Schedule(
        name="1f1b",
        title="1F1B",
        orders=_orders,
        num_chunks=None,
        overlaps_f_b=True,
        min_microbatches=lambda plan: plan.pipeline_size if plan.num_chunks > 1 else 1,
        min_microbatches_rule="with virtual stages, a step has at least one micro batch per rank",
    )
)
