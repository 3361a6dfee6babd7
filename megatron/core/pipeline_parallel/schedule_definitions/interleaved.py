"""Interleaved 1F1B: every rank holds v chunks of the model and a micro batch passes v times.

"Efficient Large-Scale Language Model Training on GPU Clusters Using Megatron-LM", section 2.2.2,
arXiv:2104.04473. Bubble (p-1)/(v*m+p-1) when m is a multiple of p, for v times the messages.

Micro batches are processed in groups. All micro batches of a group pass chunk 0, then all pass
chunk 1, and so on; then the next group starts. The smallest useful group has p micro batches. A
larger group runs the same chunk more often in a row (which hides other traffic better) and keeps
more activations.

With `overlap_f_b` ("DeepSeek-V3 Technical Report", section 3.2.1, arXiv:2412.19437), every rank
runs one more warm-up forward. Then the forward and the backward of a pair in the steady state are
independent. Plain 1F1B needs more warm-up forwards for that; the interleaved order already has
them: two for each later rank.
"""

from __future__ import annotations

from megatron.core.foundation.errors import ScheduleError
from megatron.core.pipeline_parallel.instructions import BACKWARD, FORWARD, Orders, Placement, Step


def microbatch_groups(p: int, m: int, group_size: int | None = None) -> list[range]:
    """Divide m micro batches into groups, the largest first.

    All groups have `group_size` (default p) micro batches, and the last group has the remainder. A
    remainder below p would deadlock: the first rank would start chunk 1 before the last rank, p-1
    ranks away, has finished chunk 0. Such a remainder is distributed over the full groups.
    """
    group_size = p if group_size is None else group_size
    if group_size < p:
        raise ScheduleError(
            f"a micro-batch group of {group_size} is too small for {p} pipeline ranks.",
            rule="a group has at least one micro batch per pipeline rank; otherwise its chunks "
            "wait for each other",
            flags=[
                "--microbatch-group-size-per-virtual-pipeline-stage",
                "--pipeline-model-parallel-size",
            ],
            fix=f"use {p} or more, or leave it out (the default is the pipeline size)",
        )
    num_full, remainder = divmod(m, group_size)
    if remainder == 0 or remainder >= p or num_full == 0:
        sizes = [group_size] * num_full + ([remainder] if remainder else [])
    else:
        extra, more = divmod(remainder, num_full)
        sizes = [group_size + extra + (index < more) for index in range(num_full)]
    groups, start = [], 0
    for size in sizes:
        groups.append(range(start, start + size))
        start += size
    return groups


def interleaved_order(
    p: int,
    rank: int,
    m: int,
    v: int,
    group_size: int | None = None,
    *,
    overlap_f_b: bool = False,
) -> list[Step]:
    """Return the compute steps of one rank: warm-up, steady state, cool-down."""
    groups = microbatch_groups(p, m, group_size)
    forwards = [Step(FORWARD, i, c) for group in groups for c in range(v) for i in group]
    backwards = [
        Step(BACKWARD, i, c) for group in groups for c in reversed(range(v)) for i in group
    ]
    warm_up = _warm_up(p, rank, m, v, len(groups[0]), overlap_f_b)
    steps = forwards[:warm_up]
    for forward, backward in zip(forwards[warm_up:], backwards, strict=False):
        steps.append(forward)
        steps.append(backward)
    steps.extend(backwards[m * v - warm_up :])
    return steps


def interleaved_orders(
    p: int, m: int, v: int, group_size: int | None = None, *, overlap_f_b: bool = False
) -> Orders:
    """Return the interleaved order of all ranks.

    In the steady state nearly a whole group of outputs waits between the last rank and the first.
    The send window keeps them on the last rank, which has the fewest activations.

    Args:
        overlap_f_b: overlap the forward and the backward of the steady state.
    """
    first_group = len(microbatch_groups(p, m, group_size)[0])

    def pairs(rank: int) -> range:
        warm_up = _warm_up(p, rank, m, v, first_group, overlap_f_b)
        return range(warm_up, 2 * m * v - warm_up, 2)

    return Orders(
        "interleaved",
        Placement(p, v),
        m,
        False,
        lambda rank: interleaved_order(p, rank, m, v, group_size, overlap_f_b=overlap_f_b),
        send_window=max(2, first_group),
        pairs=pairs if overlap_f_b else None,
    )


def _warm_up(p: int, rank: int, m: int, v: int, first_group: int, overlap_f_b: bool) -> int:
    """Return the number of warm-up forwards.

    The first micro batch reaches its last chunk after (v-1) runs of the first group. Two more
    steps for each later rank make the first gradient arrive exactly when it is needed. Pairs need
    one more, because the first backward of the last rank needs the forward directly before it.
    """
    way = 2 * (p - rank - 1) + (v - 1) * first_group
    return min(way + 1 if overlap_f_b else way, m * v)
