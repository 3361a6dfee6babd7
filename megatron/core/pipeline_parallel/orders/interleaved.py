"""Interleaved 1F1B: every rank holds v chunks of the model and a micro batch passes v times.

"Efficient Large-Scale Language Model Training on GPU Clusters Using Megatron-LM", section 2.2.2,
arXiv:2104.04473. Bubble (p-1)/(v*m+p-1) when m is a multiple of p, for v times the messages.

Micro batches are taken in groups. Inside a group all of them pass chunk 0, then all pass chunk 1,
and so on; then comes the next group. The smallest useful group is p: a larger one sends each
chunk's work in longer runs (which hides other traffic better) and keeps more activations.
"""

from __future__ import annotations

from megatron.core.pipeline_parallel.instructions import Op, Orders, Placement, Step


def microbatch_groups(p: int, m: int, group_size: int) -> list[range]:
    """Cut m micro batches into runs of `group_size`."""
    return [range(start, min(start + group_size, m)) for start in range(0, m, group_size)]


def interleaved_order(p: int, rank: int, m: int, v: int, group_size: int | None = None) -> list[Step]:
    group_size = p if group_size is None else group_size
    groups = microbatch_groups(p, m, group_size)
    forwards = [Step(Op.FORWARD, i, c) for group in groups for c in range(v) for i in group]
    backwards = [
        Step(Op.BACKWARD, i, c) for group in groups for c in reversed(range(v)) for i in group
    ]
    warm_up = min((p - rank - 1) * 2 + (v - 1) * group_size, m * v)
    steps = forwards[:warm_up]
    for forward, backward in zip(forwards[warm_up:], backwards):
        steps.append(forward)
        steps.append(backward)
    steps.extend(backwards[m * v - warm_up :])
    return steps


def interleaved_orders(p: int, m: int, v: int, group_size: int | None = None) -> Orders:
    return Orders(
        "interleaved",
        Placement(p, v),
        m,
        False,
        lambda rank: interleaved_order(p, rank, m, v, group_size),
    )
