"""The executor loses no more time than the plan says: stages that sleep, on 4 processes.

Sleeping stages need no processor, so the measurement holds on any machine, also on one with fewer
cores than ranks.
"""

from __future__ import annotations

import time
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from megatron.core.pipeline_parallel.programs import Plan, plan_report
from megatron.core.pipeline_parallel.recorder import PipelineRecorder
from megatron.core.pipeline_parallel.schedules import get_forward_backward_func
from tests.distributed.pipeline_parallel.linear_pipeline import LinearConfig
from tests.harness.distributed import run_distributed

MOST_STEPS = 20
TOLERANCE = 0.10
FORWARD_S = 0.040
"""Of one rank and micro batch: long against dispatch (microseconds) and a message (under 1 ms)."""


class Sleep(torch.autograd.Function):
    """The identity, taking a while in both directions."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, forward_s: float) -> Tensor:
        ctx.forward_s = forward_s
        time.sleep(forward_s)
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:  # type: ignore[override]
        time.sleep(2 * ctx.forward_s)
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
    groups: Any, schedule: str, num_chunks: int, num_microbatches: int, expected: float
) -> float:
    """Return the smallest bubble of a few steps: other processes only ever add idle time.

    The first step that is near enough ends the measurement, on all ranks together.
    """
    config = LinearConfig(pipeline_model_parallel_size=groups.pp.size(), pipeline_schedule=schedule)
    chunks = [SleepingStage(config, FORWARD_S / num_chunks) for _ in range(num_chunks)]
    recorder = PipelineRecorder()
    smallest = 1.0
    for _ in range(MOST_STEPS):
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
        smallest = min(smallest, recorder.trace(groups.pp).report().bubble)
        if smallest <= expected * (1 + TOLERANCE):
            break
    return smallest


@pytest.mark.parametrize(
    ("schedule", "num_chunks", "num_microbatches"),
    [("gpipe", 1, 4), ("1f1b", 1, 8), ("1f1b", 2, 8)],
)
def test_the_measured_bubble_is_the_simulated_one(schedule, num_chunks, num_microbatches):
    simulated = plan_report(Plan(schedule, 4, num_chunks, num_microbatches)).bubble
    arguments = (schedule, num_chunks, num_microbatches, simulated)
    measured = run_distributed(measure, 4, *arguments, pp=4)[0]
    assert measured == pytest.approx(simulated, rel=TOLERANCE)
