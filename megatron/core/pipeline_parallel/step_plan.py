"""Plan a training step: make, validate and time its program before it is run.

Programs depend on a handful of numbers only, so each is made once and cached.
"""

from __future__ import annotations

import functools
from typing import NamedTuple

from megatron.core.errors import ScheduleError
from megatron.core.pipeline_parallel.instructions import Orders, Program, Step
from megatron.core.pipeline_parallel.layout import V_SCHEDULES, placement_shape
from megatron.core.pipeline_parallel.lower import lower, lower_rank
from megatron.core.pipeline_parallel.schedule_definitions.dualpipe_v import dualpipe_v_orders
from megatron.core.pipeline_parallel.schedule_definitions.forward_only import forward_only_orders
from megatron.core.pipeline_parallel.schedule_definitions.gpipe import gpipe_orders
from megatron.core.pipeline_parallel.schedule_definitions.interleaved import interleaved_orders
from megatron.core.pipeline_parallel.schedule_definitions.one_f_one_b import one_f_one_b_orders
from megatron.core.pipeline_parallel.schedule_definitions.zero_bubble import zero_bubble_h1_orders
from megatron.core.pipeline_parallel.schedule_definitions.zero_bubble_v import zero_bubble_v_orders
from megatron.core.pipeline_parallel.simulate import Costs, Report, simulate
from megatron.core.pipeline_parallel.validate import validate, validate_rank

SCHEDULES = ("1f1b", "gpipe", "zb-h1", *V_SCHEDULES)
"""Values of `config.pipeline_schedule`. 1F1B with several chunks per rank is interleaved."""
SPLIT_SCHEDULES = ("zb-h1", *V_SCHEDULES)
"""Those that form weight gradients apart from input gradients."""
OVERLAPPED_SCHEDULES = ("1f1b", "dualpipe-v")
"""Those in which a forward and a backward can take turns: the others have no such pairs."""

MAX_STEPS_VALIDATED = 16384
"""Compute steps of all ranks together up to which a program is proved as a whole before it runs:
0.15 s at 9 microseconds a step (64 micro batches on 16 ranks with 4 chunks are 8192). Of larger
ones every rank checks its own part; `python -m tests.parity.schedules` proves their smaller
relatives exhaustively, and the steady state only repeats."""


class StepPlan(NamedTuple):
    """The numbers that decide a program."""

    schedule: str
    pipeline_size: int
    num_chunks: int
    num_microbatches: int
    group_size: int | None = None
    forward_only: bool = False
    prefetch: int = 1
    durations: tuple[int, int, int] = (1, 1, 1)
    overlap_f_b: bool = False

    def orders(self) -> Orders:
        """Return what every rank computes.

        Raises:
            ScheduleError: there is no such schedule.
        """
        p, v, m = self.pipeline_size, self.num_chunks, self.num_microbatches
        if m < 1:
            raise ScheduleError(
                f"a training step of {m} micro batches.",
                rule="a step has at least one micro batch",
                flags=["--global-batch-size", "--micro-batch-size"],
                fix="use a global batch of at least micro batch size x data-parallel size",
            )
        if self.schedule not in SCHEDULES:
            raise ScheduleError(
                f"pipeline_schedule={self.schedule!r} is not known.",
                rule=f"schedules are {', '.join(SCHEDULES)}",
                flags=["--pipeline-schedule"],
                fix="use 1f1b",
            )
        if self.forward_only:
            return forward_only_orders(p, m, v, self.group_size, placement_shape(self.schedule))
        if self.schedule in ("gpipe", "zb-h1") and v > 1:
            raise ScheduleError(
                f"the {self.schedule} schedule with {v} model chunks per rank.",
                rule="it runs one chunk per rank",
                flags=["--pipeline-schedule", "--num-virtual-stages-per-pipeline-rank"],
                fix="use --pipeline-schedule 1f1b (interleaved), or drop the virtual stages",
            )
        if self.overlap_f_b and self.schedule not in OVERLAPPED_SCHEDULES:
            raise ScheduleError(
                f"forwards and backwards that take turns, in the {self.schedule} schedule.",
                rule="each forward of the steady state stands beside a backward that it does not"
                " need",
                flags=["--overlap-moe-expert-parallel-comm", "--pipeline-schedule"],
                fix=f"use {' or '.join(OVERLAPPED_SCHEDULES)}",
            )
        if self.schedule == "zb-v" and p > 1:
            return zero_bubble_v_orders(p, m, self.durations)
        if self.schedule == "dualpipe-v" and p > 1:
            return dualpipe_v_orders(p, m, overlap_f_b=self.overlap_f_b)
        if self.schedule == "zb-h1" and p > 1:
            return zero_bubble_h1_orders(p, m)
        if v > 1:
            return interleaved_orders(p, m, v, self.group_size, overlap_f_b=self.overlap_f_b)
        if self.schedule == "gpipe" and p > 1:
            return gpipe_orders(p, m)
        return one_f_one_b_orders(p, m, overlap_f_b=self.overlap_f_b)

    @property
    def num_stages(self) -> int:
        """Return the number of stages of the whole model."""
        return self.pipeline_size * self.num_chunks

    @property
    def num_steps(self) -> int:
        """Return the number of compute steps of all ranks together."""
        forwards = self.pipeline_size * self.num_chunks * self.num_microbatches
        if self.forward_only:
            return forwards
        return forwards * (3 if self.schedule in SPLIT_SCHEDULES else 2)


@functools.lru_cache(maxsize=64)
def validated_orders(plan: StepPlan) -> Orders:
    """Return the orders of a plan after proving its program, if it is not too large for that.

    Raises:
        ScheduleError: the program is wrong or deadlocks.
    """
    orders = plan.orders()
    if plan.pipeline_size > 1 and plan.num_steps <= MAX_STEPS_VALIDATED:
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
    return simulate(lower(plan.orders(), prefetch=plan.prefetch), costs)
