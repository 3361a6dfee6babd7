"""DualPipe-V: forwards of one half of the model alternate with backwards of the other half.

The V-shaped half of DualPipe ("DeepSeek-V3 Technical Report", section 3.2.1, arXiv:2412.19437),
after "Pipeline Parallelism with Controllable Memory", section 3 (arXiv:2405.15362), for p ranks
with two chunks each: rank r holds stages r and 2p-1-r. With the durations of a chunk, F forward,
B whole backward and W its weight gradient, the bubble is (p-1)(F+2B-3W), and a rank keeps at most
2p+1 chunk activations. The steady state pairs a forward with a backward of the other chunk, so that
the expert all-to-all of one overlaps with the computation of the other.
"""

from __future__ import annotations

from itertools import pairwise

from megatron.core.foundation.errors import ScheduleError
from megatron.core.pipeline_parallel.instructions import (
    BACKWARD,
    FORWARD,
    INPUT_GRAD,
    WEIGHT_GRAD,
    Op,
    Orders,
    Placement,
    PlacementShape,
    Step,
)
from megatron.core.pipeline_parallel.schedule import Schedule, register_schedule

_RULE = "its steady state needs two micro batches per pipeline rank"


class _Writer:
    """Writes steps; the micro batch of each op and chunk increases with every step."""

    def __init__(self) -> None:
        self.steps: list[Step] = []
        self._forwards = [0, 0]
        self._backwards = [0, 0]
        self._owed: list[Step] = []  # weight gradients deferred, the oldest first

    def forward(self, chunk: int) -> None:
        self.steps.append(Step(FORWARD, self._forwards[chunk], chunk))
        self._forwards[chunk] += 1

    def backward(self, chunk: int, *, split: bool = False) -> None:
        microbatch = self._backwards[chunk]
        self._backwards[chunk] += 1
        op: Op = INPUT_GRAD if split else BACKWARD
        self.steps.append(Step(op, microbatch, chunk))
        if split:
            self._owed.append(Step(WEIGHT_GRAD, microbatch, chunk))

    def weight(self) -> None:
        self.steps.append(self._owed.pop(0))


def dualpipe_v_order(p: int, rank: int, m: int) -> list[Step]:
    """Return the compute steps of one rank: eight phases, three to fill and three to drain."""
    num_after = p - rank - 1
    write = _Writer()
    for _ in range(2 * num_after):
        write.forward(0)
    for _ in range(rank + 1):
        write.forward(0)
        write.forward(1)
    for _ in range(num_after):
        write.backward(1, split=True)
        write.weight()
        write.forward(1)
    for _ in range(m - 2 * p + rank + 1):
        write.forward(0)
        write.backward(1)
        write.forward(1)
        write.backward(0)
    for _ in range(num_after):
        write.backward(1)
        write.forward(1)
        write.backward(0)
    # After this point only deferred weight gradients can fill a wait, so defer some of them.
    for position in range(rank + 1):
        write.backward(1, split=2 * position >= rank + 1)
        write.backward(0, split=2 * position + 1 >= rank + 1)
    for _ in range(num_after):
        write.weight()
        write.backward(0, split=True)
    while write._owed:
        write.weight()
    return write.steps


def _pairs(steps: list[Step]) -> set[int]:
    """Return the indices of forwards directly before a whole backward of the other chunk."""
    return {
        index
        for index, (one, two) in enumerate(pairwise(steps))
        if one.op is FORWARD and two.op is BACKWARD and one.chunk != two.chunk
    }


def dualpipe_v_orders(p: int, m: int, *, overlap_f_b: bool = False) -> Orders:
    """Return the DualPipe-V order of all ranks.

    Args:
        overlap_f_b: overlap the pairs of the steady state.
    Raises:
        ScheduleError: fewer than 2p micro batches: the steady state would be empty.
    """
    if m < 2 * p:
        raise ScheduleError(
            f"the DualPipe-V schedule with {m} micro batches on {p} pipeline ranks.",
            rule=_RULE,
            flags=["--pipeline-schedule", "--global-batch-size", "--pipeline-model-parallel-size"],
            fix=f"use at least {2 * p} micro batches, or --pipeline-schedule zb-v",
        )
    return Orders(
        "dualpipe-v",
        Placement(p, 2, PlacementShape.V),
        m,
        False,
        lambda rank: dualpipe_v_order(p, rank, m),
        pairs=(lambda rank: _pairs(dualpipe_v_order(p, rank, m))) if overlap_f_b else None,
    )


SCHEDULE = register_schedule(
    Schedule(
        name="dualpipe-v",
        title="DualPipe-V",
        orders=lambda plan: dualpipe_v_orders(
            plan.pipeline_size, plan.num_microbatches, overlap_f_b=plan.overlap_f_b
        ),
        shape=PlacementShape.V,
        num_chunks=2,
        splits_backward=True,
        overlaps_f_b=True,
        min_microbatches=lambda plan: 2 * plan.pipeline_size,
        min_microbatches_rule=_RULE,
    )
)
