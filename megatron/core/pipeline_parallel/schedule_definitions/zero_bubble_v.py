"""ZB-V: no rank waits between its first and its last step, with the memory of 1F1B.

"Zero Bubble Pipeline Parallelism", section 6, arXiv:2401.10241. Rank r holds stages r and 2p-1-r,
so the first and the last stage are on the same rank, and all ranks keep the same number of
activations: at most 2p, each half the size of an activation of 1F1B. If F = I = W, the only idle
time is p-1 forwards, until the first micro batch reaches the last rank.

The order is found by simulation with the durations of the steps. A free rank runs, among the steps
whose data have arrived, an input gradient, because other ranks wait for it; otherwise a forward, if
memory allows; otherwise a weight gradient. Ranks depend on each other closely: an order for equal
durations loses time in every micro batch if the durations differ.
"""

from __future__ import annotations

import functools
import heapq

from megatron.core.pipeline_parallel.instructions import (
    FORWARD,
    INPUT_GRAD,
    WEIGHT_GRAD,
    Orders,
    Placement,
    PlacementShape,
    Step,
)
from megatron.core.pipeline_parallel.schedule import Schedule, register_schedule


class _Rank:
    """State of one rank in the simulation: its steps, and its possible next steps by chunk."""

    def __init__(self, most_live: int) -> None:
        self.steps: list[Step] = []
        self.forwards = [0, 0]
        self.input_grads = [0, 0]
        self.owed: list[Step] = []  # deferred weight gradients, the oldest first
        self.num_live = 0
        self.most_live = most_live
        # By chunk: arrival times of the data of each micro batch, in order.
        self.activations: list[list[int]] = [[], []]
        self.gradients: list[list[int]] = [[], []]

    def has_gradient(self, chunk: int, now: int) -> bool:
        number = self.input_grads[chunk]
        return number < len(self.gradients[chunk]) and self.gradients[chunk][number] <= now

    def has_activation(self, chunk: int, now: int) -> bool:
        number = self.forwards[chunk]
        return number < len(self.activations[chunk]) and self.activations[chunk][number] <= now

    def choose(self, now: int) -> Step | None:
        """Return the step to run now, None to wait."""
        for chunk in (0, 1):
            if self.has_gradient(chunk, now):
                return Step(INPUT_GRAD, self.input_grads[chunk], chunk)
        # Prefer chunk 1, which leads to gradients; chunk 0 leaves memory for one of its forwards.
        if self.has_activation(1, now) and self.num_live < self.most_live:
            return Step(FORWARD, self.forwards[1], 1)
        if self.has_activation(0, now) and self.num_live < self.most_live - 1:
            return Step(FORWARD, self.forwards[0], 0)
        return self.owed[0] if self.owed else None

    def take(self, step: Step) -> None:
        """Record that a step has started."""
        self.steps.append(step)
        if step.op is FORWARD:
            self.forwards[step.chunk] += 1
            self.num_live += 1
        elif step.op is INPUT_GRAD:
            self.input_grads[step.chunk] += 1
            self.owed.append(Step(WEIGHT_GRAD, step.microbatch, step.chunk))
        else:
            self.owed.pop(0)
            self.num_live -= 1


@functools.lru_cache(maxsize=8)
def _play(p: int, m: int, durations: tuple[int, int, int]) -> tuple[tuple[Step, ...], ...]:
    """Return the steps of all ranks; ties are broken by rank, so all ranks compute equal orders."""
    placement = Placement(p, 2, PlacementShape.V)
    ranks = [_Rank(2 * p) for _ in range(p)]
    ranks[0].activations[0] = [0] * m
    duration = dict(zip((FORWARD, INPUT_GRAD, WEIGHT_GRAD), durations, strict=True))
    num_left = 6 * m * p
    events = [(0, rank) for rank in range(p)]  # (time, rank) that may be able to run a step
    free = [0] * p
    while num_left:
        now, number = heapq.heappop(events)
        while events and events[0] == (now, number):
            heapq.heappop(events)
        if free[number] > now:
            continue
        step = ranks[number].choose(now)
        if step is None:
            continue
        end = now + duration[step.op]
        ranks[number].take(step)
        num_left -= 1
        free[number] = end
        heapq.heappush(events, (end, number))
        target = None
        if step.op is FORWARD:
            target = placement.next(number, step.chunk)
            if target is None:
                ranks[number].gradients[step.chunk].append(end)
            else:
                ranks[target[0]].activations[target[1]].append(end)
        elif step.op is INPUT_GRAD:
            target = placement.previous(number, step.chunk)
            if target is not None:
                ranks[target[0]].gradients[target[1]].append(end)
        if target is not None:
            heapq.heappush(events, (end, target[0]))
    return tuple(tuple(rank.steps) for rank in ranks)


def zero_bubble_v_orders(p: int, m: int, durations: tuple[int, int, int] = (1, 1, 1)) -> Orders:
    """Return the ZB-V order of all ranks.

    Args:
        durations: of a forward, an input gradient and a weight gradient of one chunk.
    """
    return Orders(
        "zb-v",
        Placement(p, 2, PlacementShape.V),
        m,
        False,
        lambda rank: list(_play(p, m, durations)[rank]),
        send_window=max(2, p),
    )


SCHEDULE = register_schedule(
    Schedule(
        name="zb-v",
        title="ZB-V",
        orders=lambda plan: zero_bubble_v_orders(
            plan.pipeline_size, plan.num_microbatches, plan.durations
        ),
        shape=PlacementShape.V,
        num_chunks=2,
        splits_backward=True,
    )
)
