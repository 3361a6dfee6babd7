"""Timeline of a pipeline with its communication: the schedule's program with the model's costs."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

import numpy as np

from megatron.core.pipeline_parallel.instructions import Op
from megatron.core.pipeline_parallel.schedule import StepPlan
from megatron.core.pipeline_parallel.simulate import Costs, Span
from megatron.core.pipeline_parallel.step_plan import plan_report
from megatron_lattice.planner.collectives import CollectiveCosts
from megatron_lattice.planner.hardware import Hardware, rows_hardware
from megatron_lattice.planner.layer_time import layer_time, output_layer_time
from megatron_lattice.planner.operators import OperatorCosts
from megatron_lattice.planner.step_time import (
    layers_of_last_stage,
    layers_of_slowest_stage,
    message_time,
    predict_step,
)
from megatron_lattice.planner.workload import Workloads


class Activity(Enum):
    """Activity of a rank or of its network."""

    FORWARD = "forward"
    BACKWARD = "backward"
    COLLECTIVES = "exposed tensor, context and expert communication"
    MESSAGE = "message to the next or previous stage"
    GRADIENTS = "exposed data-parallel communication"
    OPTIMIZER = "optimizer"


@dataclass(frozen=True, kw_only=True)
class Bar:
    """One activity of a pipeline rank; communication is drawn below compute."""

    rank: int
    activity: Activity
    start: float
    end: float
    label: str = ""


@dataclass(frozen=True)
class Timeline:
    """Bars of all pipeline ranks.

    Attributes:
        num_microbatches: number that is drawn; a step repeats the middle ones.
        chunks: number on a rank.
    """

    bars: list[Bar]
    num_ranks: int
    num_microbatches: int
    chunks: int


def timeline_of(row: Workloads, hardware: Hardware, *, most_passes: int = 64) -> Timeline:
    """Return the timeline of a table of one row.

    Args:
        most_passes: maximum number of drawn forward passes per rank; further micro batches are left
            out, except one for each stage.
    """
    rows = rows_hardware(row, hardware)
    operators = OperatorCosts(row, rows, hardware)
    collectives = CollectiveCosts(row, rows, hardware)
    layer, head = layer_time(operators, collectives), output_layer_time(operators)
    p, v = int(row.pipeline_size[0]), int(row.num_chunks[0])
    number = min(int(row.num_microbatches[0]), max(most_passes // v // p, 1) * p)
    most = layers_of_slowest_stage(row)
    layers = np.full(p * v, float(most[0]) / v)
    layers[-1] -= float((most - layers_of_last_stage(row, most))[0])
    forward = layers * layer.forward[0]
    backward = layers * layer.backward[0]
    forward[-1] += head.forward[0]
    backward[-1] += head.backward[0]
    whole = forward + backward
    message = float(message_time(row, collectives)[0])
    costs = Costs(
        forward=float(forward[0]),
        backward=float(backward[0]),
        transfer=message,
        stage_scale=tuple((whole / whole[0]).tolist()),
    )
    spans = plan_report(StepPlan("1f1b", p, v, number), costs).spans
    share = float(layer.exposed[0] / (layer.forward[0] + layer.backward[0]))
    bars = [bar for span in spans for bar in _bars_of(span, v, share)]
    if p > 1:
        bars += _messages(spans, p, v, message)
    return Timeline(bars + _end_of_step(row, hardware, spans), p, number, v)


def _bars_of(span: Span, chunks: int, exposed: float) -> list[Bar]:
    activity = Activity.FORWARD if span.step.op is Op.FORWARD else Activity.BACKWARD
    label = span.step.label(chunks)
    found = [Bar(rank=span.rank, activity=activity, start=span.start, end=span.end, label=label)]
    if exposed:
        begin = span.end - exposed * (span.end - span.start)
        found.append(Bar(rank=span.rank, activity=Activity.COLLECTIVES, start=begin, end=span.end))
    return found


def _messages(spans: list[Span], p: int, v: int, seconds: float) -> list[Bar]:
    """Return the messages that each rank sends after it computed them."""
    found = []
    for span in spans:
        stage = span.step.chunk * p + span.rank
        is_last = stage == (p * v - 1 if span.step.op is Op.FORWARD else 0)
        if not is_last:
            found.append(
                Bar(
                    rank=span.rank,
                    activity=Activity.MESSAGE,
                    start=span.end,
                    end=span.end + seconds,
                )
            )
    return found


def _end_of_step(row: Workloads, hardware: Hardware, spans: list[Span]) -> list[Bar]:
    step = predict_step(row, hardware)
    reduced, updated = float(step.data_exposed[0]), float(step.optimizer[0])
    last = max(span.end for span in spans)
    found = []
    for rank in sorted({span.rank for span in spans}):
        ended = max(span.end for span in spans if span.rank == rank)
        if reduced:
            end = ended + reduced
            found.append(Bar(rank=rank, activity=Activity.GRADIENTS, start=ended, end=end))
        # The norm of the gradients needs all stages.
        begin = last + reduced
        found.append(Bar(rank=rank, activity=Activity.OPTIMIZER, start=begin, end=begin + updated))
    return found
