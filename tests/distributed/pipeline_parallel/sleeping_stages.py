"""Stages that sleep instead of computing: what a step takes is then known beforehand.

Neither sleeping nor waiting for a message takes processor time, so the measurement holds on any
machine, also on a busy one with fewer cores than ranks.
"""

import functools
import time
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from megatron.core.pipeline_parallel.recorder import PipelineRecorder
from megatron.core.pipeline_parallel.schedule import StepPlan
from megatron.core.pipeline_parallel.schedules import get_forward_backward_func
from megatron.core.pipeline_parallel.simulate import Costs, Report
from megatron.core.pipeline_parallel.step_plan import plan_report
from megatron.core.step_context.deferred_wgrad import defer_wgrad
from megatron.core.step_context.overlap import yield_to_peer
from tests.distributed.pipeline_parallel.linear_pipeline import LinearConfig


@dataclass(frozen=True)
class SleepingCase:
    """A schedule, and how long its stages sleep.

    A forward is half of its compute, an exchange with other ranks, and the other half; a backward
    the same with twice the compute. So a pair that takes turns hides both its exchanges, if they
    are not longer than half of a forward's compute.
    """

    schedule: str
    num_chunks: int
    num_microbatches: int
    compute_s: float
    """Of a forward of one chunk."""
    num_ranks: int = 4
    exchange_s: float = 0.0
    overlap_f_b: bool = False

    def simulated(self) -> Report:
        """Return what the simulator says of the case."""
        assert 2 * self.exchange_s <= self.compute_s
        costs = Costs(
            forward=self.compute_s + self.exchange_s,
            backward=2 * self.compute_s + self.exchange_s,
            input_grad=self.compute_s + self.exchange_s,
            weight_grad=self.compute_s,
            pair=3 * self.compute_s if self.overlap_f_b else None,
        )
        plan = StepPlan(self.schedule, self.num_ranks, self.num_chunks, self.num_microbatches)
        return plan_report(plan._replace(overlap_f_b=self.overlap_f_b), costs)


class Measured(NamedTuple):
    """What one rank saw of some steps, of each the bubble and the duration."""

    bubbles: list[float]
    makespans_s: list[float]
    processor_share: float
    """This rank's processor time per second of the steps."""


class Sleep(torch.autograd.Function):
    """The identity, taking a while in both directions."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, forward_s: float) -> Tensor:
        ctx.forward_s = forward_s
        time.sleep(forward_s)
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:  # type: ignore[override]
        time.sleep(ctx.forward_s)
        rest = functools.partial(time.sleep, ctx.forward_s)
        if not defer_wgrad(rest):
            rest()
        return grad, None


class Exchange(torch.autograd.Function):
    """The identity, under way for a while in both directions: another computation may work."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, exchange_s: float) -> Tensor:
        ctx.exchange_s = exchange_s
        _ring(exchange_s)
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:  # type: ignore[override]
        _ring(ctx.exchange_s)
        return grad, None


def _ring(exchange_s: float) -> None:
    arrival = time.perf_counter() + exchange_s
    yield_to_peer()
    time.sleep(max(0.0, arrival - time.perf_counter()))


class SleepingStage(nn.Module):
    """A stage that computes nothing, in the time that its case says."""

    def __init__(self, config: LinearConfig, case: SleepingCase) -> None:
        super().__init__()
        self.config, self.case = config, case
        self.scale = nn.Parameter(torch.ones(()))
        self.input: Tensor | None = None

    def set_input_tensor(self, tensor: Tensor) -> None:
        self.input = tensor

    def forward(self) -> Tensor:
        x = torch.ones(2, 1, self.config.hidden_size) if self.input is None else self.input
        self.input = None
        x, compute_s, exchange_s = x * self.scale, self.case.compute_s, self.case.exchange_s
        if exchange_s == 0.0:
            return Sleep.apply(x, compute_s)
        there = Exchange.apply(Sleep.apply(x, compute_s / 2), exchange_s)
        return Sleep.apply(there, compute_s / 2)


def measure(groups: Any, case: SleepingCase, num_steps: int) -> Measured:
    """Run a case on the ranks of `groups.pp`."""
    config = LinearConfig(
        pipeline_model_parallel_size=groups.pp.size(),
        pipeline_schedule=case.schedule,
        overlap_moe_expert_parallel_comm=case.overlap_f_b,
    )
    chunks = [SleepingStage(config, case) for _ in range(case.num_chunks)]
    recorder = PipelineRecorder()

    def step() -> Report:
        get_forward_backward_func()(
            forward_step_func=lambda _, model: (model(), lambda out: (out.mean(), {})),
            data_iterator=None,
            model=chunks,
            num_microbatches=case.num_microbatches,
            seq_length=2,
            micro_batch_size=1,
            pg_collection=groups,
            recorder=recorder,
        )
        return recorder.trace(groups.pp).report()

    wall, processor = time.perf_counter(), time.process_time()
    reports = [step() for _ in range(num_steps)]
    share = (time.process_time() - processor) / (time.perf_counter() - wall)
    return Measured([r.bubble for r in reports], [r.makespan for r in reports], share)
