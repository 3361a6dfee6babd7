"""Measure the compute steps of each pipeline rank, for a timeline and for the run's timers."""

from __future__ import annotations

import socket
import time
from collections.abc import Callable
from functools import partial
from typing import Any

from megatron.core.foundation import device
from megatron.core.pipeline_parallel.instructions import Op, Placement, Step
from megatron.core.pipeline_parallel.simulate import Span
from megatron.core.pipeline_parallel.stage import PipelineStage
from megatron.core.pipeline_parallel.timeline import Trace
from megatron.core.topology.group import Group
from megatron.core.transport import torch_collectives
from megatron.core.transport.object_collectives import all_gather_object


class PipelineRecorder:
    """Records the compute steps of this rank in one training step; the next step replaces them.

    On an accelerator it waits for the device around every step, which prevents overlap.
    """

    def __init__(self) -> None:
        self.placement = Placement(1)
        self.num_microbatches = 0
        self.rank = 0
        self.spans: list[Span] = []

    def begin(self, placement: Placement, rank: int, num_microbatches: int) -> None:
        """Start a new step without spans."""
        self.placement, self.rank = placement, rank
        self.num_microbatches = num_microbatches
        self.spans = []

    def trace(self, pp_group: Group, title: str = "measured") -> Trace:
        """Return the timeline of all ranks of the pipeline; it is equal on all ranks.

        Ranks on one host share a clock. Ranks on several hosts compare their clocks after a
        barrier, so the error is the spread of the times when ranks leave the barrier.

        Communication:
            a barrier and an all-gather of Python objects on `pp_group`.
        """
        torch_collectives.barrier(pp_group)
        mine = (socket.gethostname(), time.perf_counter(), self.spans)
        everyone = all_gather_object(mine, pp_group)
        share_clock = len({host for host, _, _ in everyone}) == 1
        shifted = [
            (span, 0.0 if share_clock else clock) for _, clock, spans in everyone for span in spans
        ]
        origin = min((span.start - shift for span, shift in shifted), default=0.0)
        spans = [
            span._replace(start=span.start - shift - origin, end=span.end - shift - origin)
            for span, shift in shifted
        ]
        return Trace(title, self.placement, self.num_microbatches, "s", spans)


class MeasuredStage:
    """A stage whose calls are recorded and timed.

    The waiting time of the executor for data of other ranks is not included.
    """

    def __init__(
        self, stage: PipelineStage, chunk: int, recorder: PipelineRecorder | None, timers: Any
    ) -> None:
        self._chunk, self._recorder, self._timers = chunk, recorder, timers
        self.forward = partial(self._call, stage.forward, Op.FORWARD)
        self.backward = partial(self._call, stage.backward, Op.BACKWARD)
        self.input_grad = partial(self._call, stage.input_grad, Op.INPUT_GRAD)
        self.weight_grad = partial(self._call, stage.weight_grad, Op.WEIGHT_GRAD)

    def _call(self, call: Callable[..., Any], op: Op, microbatch: int, *tensors: Any) -> Any:
        name = "forward-compute" if op is Op.FORWARD else "backward-compute"
        if self._timers is not None:
            self._timers(name, log_level=2).start()
        if self._recorder is not None:
            device.synchronize()
        start = time.perf_counter()
        result = call(microbatch, *tensors)
        if self._recorder is not None:
            device.synchronize()
            step = Step(op, microbatch, self._chunk)
            self._recorder.spans.append(Span(self._recorder.rank, step, start, time.perf_counter()))
        if self._timers is not None:
            self._timers(name, log_level=2).stop()
        return result
