"""Interleaved 1F1B: every rank holds v chunks of the model and a micro batch passes v times.

"Efficient Large-Scale Language Model Training on GPU Clusters Using Megatron-LM", section 2.2.2,
arXiv:2104.04473. Bubble (p-1)/(v*m+p-1) when m is a multiple of p, for v times the messages.

Micro batches are taken in groups. Inside a group all of them pass chunk 0, then all pass chunk 1,
and so on; then comes the next group. The smallest useful group is p: a larger one sends each
chunk's work in longer runs (which hides other traffic better) and keeps more activations.

Combined ("DeepSeek-V3 Technical Report", section 3.2.1, arXiv:2412.19437), every rank runs one
forward more ahead. That alone makes the forward and the backward of its steady state independent
of each other: the two steps for each rank after this one, which plain 1F1B lacks, are here anyway.
"""

from __future__ import annotations

from megatron.core.foundation.errors import ScheduleError
from megatron.core.pipeline_parallel.instructions import BACKWARD, FORWARD, Orders, Placement, Step


def microbatch_groups(p: int, m: int, group_size: int | None = None) -> list[range]:
    """Cut m micro batches into groups, the largest first.

    All groups have `group_size` (default p) micro batches and the last one the remainder. A
    remainder below p would deadlock: its chunk 1 starts before the first rank could have seen the
    end of its chunk 0, p-1 ranks away. It is dealt over the full groups instead.
    """
    group_size = p if group_size is None else group_size
    if group_size < p:
        raise ScheduleError(
            f"a micro-batch group of {group_size} is too small for {p} pipeline ranks.",
            rule="a group must hold at least one micro batch per pipeline rank, or its chunks wait "
            "for each other",
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

    In the steady state nearly a whole group of outputs waits between the last rank and the first;
    with this window they wait with their sender, which has the fewest activations to keep.

    Args:
        overlap_f_b: make the two steps of the steady state a pair.
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
    """Return how many forwards come before the steady state.

    The way of the first micro batch up to its last chunk, (v-1) runs of the first group, plus two
    steps for each rank after this one: it brings the first gradient to every rank just when it is
    needed. For pairs one more: the last rank's first backward is that of the forward before it.
    """
    way = 2 * (p - rank - 1) + (v - 1) * first_group
    return min(way + 1 if overlap_f_b else way, m * v)
