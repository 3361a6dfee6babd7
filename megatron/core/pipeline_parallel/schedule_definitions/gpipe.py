"""GPipe: all forwards, then all backwards.

"GPipe: Easy Scaling with Micro-Batch Pipeline Parallelism", section 2.3, arXiv:1811.06965.
Bubble (p-1)/(m+p-1); every rank keeps the activations of all m micro batches.
"""

from __future__ import annotations

from megatron.core.pipeline_parallel.instructions import BACKWARD, FORWARD, Orders, Placement, Step
from megatron.core.pipeline_parallel.schedule import Schedule, register_schedule


def gpipe_order(m: int) -> list[Step]:
    """Return the compute steps of a rank; they are equal on all ranks."""
    forwards = [Step(FORWARD, microbatch, 0) for microbatch in range(m)]
    backwards = [Step(BACKWARD, microbatch, 0) for microbatch in range(m)]
    return forwards + backwards


def gpipe_orders(p: int, m: int) -> Orders:
    """Return the GPipe order of all ranks."""
    return Orders("gpipe", Placement(p), m, False, lambda _rank: gpipe_order(m))


SCHEDULE = register_schedule(
    Schedule(
        name="gpipe",
        title="GPipe",
        orders=lambda plan: gpipe_orders(plan.pipeline_size, plan.num_microbatches),
        runs_forwards_first=True,
    )
)
