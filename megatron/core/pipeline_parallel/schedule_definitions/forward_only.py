"""Forward-only: evaluation and inference, no gradients.

Micro batches are grouped as in interleaved 1F1B, so a rank never waits for a micro batch that is
still p-1 stages away. Bubble (p-1)/(v*m+p-1).
"""

from __future__ import annotations

from megatron.core.pipeline_parallel.instructions import (
    FORWARD,
    Orders,
    Placement,
    PlacementShape,
    Step,
)
from megatron.core.pipeline_parallel.schedule_definitions.interleaved import microbatch_groups


def forward_only_order(p: int, m: int, v: int = 1, group_size: int | None = None) -> list[Step]:
    """Return the compute steps of a rank; they are equal on all p ranks."""
    groups = microbatch_groups(p, m, group_size)
    return [Step(FORWARD, i, c) for group in groups for c in range(v) for i in group]


def forward_only_orders(
    p: int,
    m: int,
    v: int = 1,
    group_size: int | None = None,
    shape: PlacementShape = PlacementShape.LOOP,
) -> Orders:
    """Return the forward-only order of all ranks."""
    return Orders(
        "forward_only",
        Placement(p, v, shape),
        m,
        True,
        lambda _rank: forward_only_order(p, m, v, group_size),
        send_window=max(2, len(microbatch_groups(p, m, group_size)[0])),
    )
