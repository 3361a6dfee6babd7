"""Measure what each pipeline rank did when, and what the timers of a run want to know."""

from __future__ import annotations

import socket
import time
from collections.abc import Sequence
from typing import Any

from torch import Tensor

from megatron.core.foundation import device
from megatron.core.pipeline_parallel.instructions import Op, Placement, Step
from megatron.core.pipeline_parallel.simulate import Span
from megatron.core.pipeline_parallel.stage import PipelineStage
from megatron.core.pipeline_parallel.trace import Trace
from megatron.core.topology.group import Group
from megatron.core.transport import torch_collectives
from megatron.core.transport.object_collectives import all_gather_object


class PipelineRecorder:
    """Keeps the compute steps of this rank in the last training step that it was passed to.

    On an accelerator it waits for the device around every step, which costs overlap.
    """

    def __init__(self) -> None:
        self.placement = Placement(1)
        self.num_microbatches = 0
        self.rank = 0
        self.spans: list[Span] = []

    def begin(self, placement: Placement, rank: int, num_microbatches: int) -> None:
        """Forget the last step and start a new one."""
        self.placement, self.rank = placement, rank
        self.num_microbatches = num_microbatches
        self.spans = []

    def trace(self, pp_group: Group, title: str = "measured") -> Trace:
        """Join the steps of all ranks of the pipeline; the same on all of them.

        Ranks on one host share a clock. Those of several hosts compare their clocks at a barrier,
        which is as exact as the ranks leave it together.

        Communication:
            a barrier and an all-gather of Python objects on `pp_group`.
        """
        torch_collectives.barrier(pp_group)
        mine = (socket.gethostname(), time.perf_counter(), self.spans)
        everyone = all_gather_object(mine, pp_group)
        share_clock = len({host for host, _, _ in everyone}) == 1
        shifts = [0.0 if share_clock else clock for _, clock, _ in everyone]
        recorded = [spans for _, _, spans in everyone]
        origin = min(
            (
                span.start - shift
                for shift, spans in zip(shifts, recorded, strict=True)
                for span in spans
            ),
            default=0.0,
        )
        return Trace(
            title,
            self.placement,
            self.num_microbatches,
            "s",
            [
                span._replace(start=span.start - shift - origin, end=span.end - shift - origin)
                for shift, spans in zip(shifts, recorded, strict=True)
                for span in spans
            ],
        )


class MeasuredStage:
    """A stage whose calls are recorded and counted by the run's timers.

    Waiting for data of other ranks is not included: it happens before these calls.
    """

    def __init__(
        self, stage: PipelineStage, chunk: int, recorder: PipelineRecorder | None, timers: Any
    ) -> None:
        self._stage = stage
        self._chunk = chunk
        self._recorder = recorder
        self._timers = timers

    def forward(self, microbatch: int, inputs: list[Tensor] | None) -> list[Tensor]:
        """Run and measure one forward: inputs and outputs [s, b, h]."""
        start = self._start("forward-compute")
        outputs = self._stage.forward(microbatch, inputs)
        self._stop("forward-compute", Op.FORWARD, microbatch, start)
        return outputs

    def backward(self, microbatch: int, output_grads: Sequence[Tensor] | None) -> list[Tensor]:
        """Run and measure one backward: gradients [s, b, h]."""
        start = self._start("backward-compute")
        grads = self._stage.backward(microbatch, output_grads)
        self._stop("backward-compute", Op.BACKWARD, microbatch, start)
        return grads

    def input_grad(self, microbatch: int, output_grads: Sequence[Tensor] | None) -> list[Tensor]:
        """Run and measure the first half of a backward: gradients [s, b, h]."""
        start = self._start("backward-compute")
        grads = self._stage.input_grad(microbatch, output_grads)
        self._stop("backward-compute", Op.INPUT_GRAD, microbatch, start)
        return grads

    def weight_grad(self, microbatch: int) -> None:
        """Run and measure the second half of a backward."""
        start = self._start("backward-compute")
        self._stage.weight_grad(microbatch)
        self._stop("backward-compute", Op.WEIGHT_GRAD, microbatch, start)

    def _start(self, timer: str) -> float:
        if self._timers is not None:
            self._timers(timer, log_level=2).start()
        if self._recorder is not None:
            device.synchronize()
        return time.perf_counter()

    def _stop(self, timer: str, op: Op, microbatch: int, start: float) -> None:
        if self._recorder is not None:
            device.synchronize()
            step = Step(op, microbatch, self._chunk)
            rank = self._recorder.rank
            self._recorder.spans.append(Span(rank, step, start, time.perf_counter()))
        if self._timers is not None:
            self._timers(timer, log_level=2).stop()
