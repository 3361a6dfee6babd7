"""1F1B: after a warm-up, every rank alternates one forward and one backward.

"PipeDream: Generalized Pipeline Parallelism for DNN Training", section 3.2 (arXiv:1806.03377),
in the flushing form of "Memory-Efficient Pipeline-Parallel DNN Training", section 3.1
(arXiv:2006.09503). Same bubble as GPipe, (p-1)/(m+p-1), but rank r keeps the activations of at
most p-r micro batches instead of m.
"""

from __future__ import annotations

from megatron.core.pipeline_parallel.instructions import BACKWARD, FORWARD, Orders, Placement, Step


def one_f_one_b_order(p: int, rank: int, m: int) -> list[Step]:
    """Return the compute steps of one rank: warm-up, steady state, cool-down.

    The warm-up is as long as the way of a micro batch from this rank to the last one, so that
    the first gradient arrives just when it is over. With p = 1 it is empty: F0 B0 F1 B1 ...
    """
    warm_up = min(p - rank - 1, m)
    steps = [Step(FORWARD, microbatch, 0) for microbatch in range(warm_up)]
    for microbatch in range(warm_up, m):
        steps.append(Step(FORWARD, microbatch, 0))
        steps.append(Step(BACKWARD, microbatch - warm_up, 0))
    steps.extend(Step(BACKWARD, microbatch, 0) for microbatch in range(m - warm_up, m))
    return steps


def one_f_one_b_orders(p: int, m: int) -> Orders:
    """Return the 1F1B order of all ranks."""
    return Orders("1f1b", Placement(p), m, False, lambda rank: one_f_one_b_order(p, rank, m))
