"""The executor loses no more time than the plan says: stages that sleep, on 4 processes.

Neither sleeping nor waiting for a message takes processor time, so the measurement holds on any
machine, also on a busy one with fewer cores than ranks.
"""

from __future__ import annotations

import functools
import statistics
import time
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from megatron.core.deferred_gradients import put_off
from megatron.core.pipeline_parallel.programs import Plan, plan_report
from megatron.core.pipeline_parallel.recorder import PipelineRecorder
from megatron.core.pipeline_parallel.schedules import get_forward_backward_func
from megatron.core.pipeline_parallel.simulate import Costs
from tests.distributed.pipeline_parallel.linear_pipeline import LinearConfig
from tests.harness.distributed import run_distributed

NUM_STEPS = 3
TOLERANCE = 0.10
LEAST_TOLERANCE = 0.02
"""Of the step: where next to nothing is idle, a tenth of it is less than the messages take."""
FORWARD_S = 0.060
"""Of one chunk and micro batch. A message takes 0.3 ms, and some ms on a machine with more work
than cores, where processes that wake up queue: both are small against it."""
MOST_PROCESSOR_SHARE = 0.10
"""Of the wall time of a step. A rank that polled while it waits would use its share of the bubble,
a quarter and more."""


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
        if not put_off(rest):
            rest()
        return grad, None


class SleepingStage(nn.Module):
    """A stage that takes `forward_s` forward and twice that backward."""

    def __init__(self, config: LinearConfig, forward_s: float) -> None:
        super().__init__()
        self.config = config
        self.forward_s = forward_s
        self.scale = nn.Parameter(torch.ones(()))
        self.input: Tensor | None = None

    def set_input_tensor(self, tensor: Tensor) -> None:
        self.input = tensor

    def forward(self) -> Tensor:
        x = torch.ones(2, 1, self.config.hidden_size) if self.input is None else self.input
        self.input = None
        return Sleep.apply(x * self.scale, self.forward_s)


def sleeping_step(iterator: Any, model: nn.Module) -> Any:
    return model(), lambda out: (out.mean(), {})


def measure(
    groups: Any, schedule: str, num_chunks: int, num_microbatches: int
) -> tuple[list[float], float]:
    """Return the bubble of each step, and this rank's processor time per second of them."""
    config = LinearConfig(pipeline_model_parallel_size=groups.pp.size(), pipeline_schedule=schedule)
    chunks = [SleepingStage(config, FORWARD_S) for _ in range(num_chunks)]
    recorder = PipelineRecorder()

    def step() -> float:
        get_forward_backward_func()(
            forward_step_func=sleeping_step,
            data_iterator=None,
            model=chunks,
            num_microbatches=num_microbatches,
            seq_length=2,
            micro_batch_size=1,
            pg_collection=groups,
            recorder=recorder,
        )
        return recorder.trace(groups.pp).report().bubble

    wall, processor = time.perf_counter(), time.process_time()
    bubbles = [step() for _ in range(NUM_STEPS)]
    return bubbles, (time.process_time() - processor) / (time.perf_counter() - wall)


@pytest.mark.parametrize(
    ("schedule", "num_chunks", "num_microbatches"),
    [
        ("gpipe", 1, 4),
        ("1f1b", 1, 4),
        ("1f1b", 2, 4),
        ("zb-h1", 1, 4),
        ("zb-v", 2, 4),
        ("dualpipe-v", 2, 8),
    ],
)
def test_the_measured_bubble_is_the_simulated_one(schedule, num_chunks, num_microbatches):
    costs = Costs(forward=FORWARD_S, backward=2 * FORWARD_S)
    simulated = plan_report(Plan(schedule, 4, num_chunks, num_microbatches), costs).bubble
    arguments = (schedule, num_chunks, num_microbatches)
    results = run_distributed(measure, 4, *arguments, pp=4)
    bubbles, _ = results[0]
    assert statistics.median(bubbles) == pytest.approx(
        simulated, rel=TOLERANCE, abs=LEAST_TOLERANCE
    ), bubbles
    shares = [share for _, share in results]
    assert max(shares) < MOST_PROCESSOR_SHARE, shares
