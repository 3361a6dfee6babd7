"""Plan a training step: build, validate and time its program before it runs.

A program depends on a few numbers only, so each program is built once and cached.
"""

from __future__ import annotations

import functools

from megatron.core.foundation.errors import ScheduleError
from megatron.core.pipeline_parallel.instructions import Orders, Program, Step
from megatron.core.pipeline_parallel.lower import lower, lower_rank
from megatron.core.pipeline_parallel.schedule import StepPlan
from megatron.core.pipeline_parallel.schedule_definitions import schedule_named
from megatron.core.pipeline_parallel.schedule_definitions.forward_only import forward_only_orders
from megatron.core.pipeline_parallel.schedule_definitions.one_f_one_b import SCHEDULE as ONE_F_ONE_B
from megatron.core.pipeline_parallel.simulate import Costs, Report, simulate
from megatron.core.pipeline_parallel.validate import validate, validate_rank

MAX_STEPS_VALIDATED = 16384
"""Largest number of compute steps, over all ranks, for which the whole program is proved before it
runs: 0.15 s at 9 microseconds a step (64 micro batches on 16 ranks with 4 chunks are 8192). For
larger programs every rank checks its own part. `python -m tests.parity.schedules` proves smaller
programs of every schedule exhaustively; a larger one only has a longer steady state."""


def compute_orders(plan: StepPlan) -> Orders:
    """Return the compute steps of every rank.

    Raises:
        ScheduleError: the schedule does not exist, or does not support these numbers.
    """
    p, v, m = plan.pipeline_size, plan.num_chunks, plan.num_microbatches
    if m < 1:
        raise ScheduleError(
            f"a training step of {m} micro batches.",
            rule="a step has at least one micro batch",
            flags=["--global-batch-size", "--micro-batch-size"],
            fix="use a global batch of at least micro batch size x data-parallel size",
        )
    schedule = schedule_named(plan.schedule)
    if plan.forward_only:
        return forward_only_orders(p, m, v, plan.group_size, schedule.shape)
    if not schedule.takes_chunks(v, p):
        raise schedule.chunks_error(v)
    if plan.overlap_f_b and not schedule.overlaps_f_b:
        raise schedule.overlap_error()
    # A single rank never waits, so every schedule runs as 1F1B, which keeps the fewest activations.
    return (schedule if p > 1 else ONE_F_ONE_B).orders(plan)


def num_compute_steps(plan: StepPlan) -> int:
    """Return the number of compute steps of all ranks together."""
    forwards = plan.num_stages * plan.num_microbatches
    if plan.forward_only:
        return forwards
    return forwards * (3 if schedule_named(plan.schedule).splits_backward else 2)


@functools.lru_cache(maxsize=64)
def validated_orders(plan: StepPlan) -> Orders:
    """Return the orders of a plan; prove its program unless it exceeds `MAX_STEPS_VALIDATED`.

    Raises:
        ScheduleError: the program is wrong or deadlocks.
    """
    orders = compute_orders(plan)
    if plan.pipeline_size > 1 and num_compute_steps(plan) <= MAX_STEPS_VALIDATED:
        validate(lower(orders, prefetch=plan.prefetch))
    return orders


@functools.lru_cache(maxsize=64)
def rank_program(plan: StepPlan, rank: int, delayed_grad_sync: bool) -> tuple[Step, ...]:
    """Return the checked program of one rank."""
    orders = validated_orders(plan)
    steps = lower_rank(orders, rank, prefetch=plan.prefetch, delayed_grad_sync=delayed_grad_sync)
    program = Program(
        schedule=orders.schedule,
        placement=orders.placement,
        num_microbatches=orders.num_microbatches,
        forward_only=orders.forward_only,
        ranks=tuple(steps if other == rank else () for other in range(plan.pipeline_size)),
        prefetch=plan.prefetch,
        send_window=orders.send_window,
    )
    validate_rank(program, rank)
    return steps


@functools.lru_cache(maxsize=64)
def plan_report(plan: StepPlan, costs: Costs = Costs()) -> Report:  # noqa: B008  a frozen constant
    """Return makespan, bubble and peak live activations of a plan under the given costs."""
    return simulate(lower(compute_orders(plan), prefetch=plan.prefetch), costs)
