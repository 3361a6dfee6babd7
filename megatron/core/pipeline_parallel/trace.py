"""A timeline of a pipeline, planned or measured, and its file formats.

Pure Python, no torch. Both kinds hold the same spans, so every picture of `plot.py` and every
number of `simulate.report` can be had for a plan and for a run.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megatron.core.foundation.errors import DataError
from megatron.core.foundation.json_text import parse_json
from megatron.core.pipeline_parallel.instructions import (
    SHORT_NAME,
    Op,
    Placement,
    PlacementShape,
    Program,
    Step,
)
from megatron.core.pipeline_parallel.simulate import (
    Costs,
    Report,
    Span,
    report,
    simulate,
)

FORMAT = "lattice-pipeline-trace-1"
_OP_OF_NAME = {name: op for op, name in SHORT_NAME.items()}


@dataclass(frozen=True)
class Trace:
    """Compute steps of all ranks of one pipeline with their times.

    Attributes:
        title: what the picture is headed with.
        placement: where each stage lives.
        num_microbatches: m.
        unit: of the times, "s" for measured ones, "" for those of a plan.
        spans: one per compute step.
    """

    title: str
    placement: Placement
    num_microbatches: int
    unit: str
    spans: list[Span]

    def report(self) -> Report:
        """Return makespan, bubble and peak live activations, counted from the spans alone."""
        return report(self.spans, self.placement.num_ranks, self._peak_live())

    def _peak_live(self) -> list[int]:
        live = [0] * self.placement.num_ranks
        peak = [0] * self.placement.num_ranks
        for span in sorted(self.spans, key=lambda span: span.start):
            if span.step.op is Op.FORWARD:
                live[span.rank] += 1
                peak[span.rank] = max(peak[span.rank], live[span.rank])
            elif span.step.op is not Op.INPUT_GRAD:
                live[span.rank] -= 1
        return peak

    def to_json(self) -> str:
        """Return the trace as JSON text."""
        return json.dumps(
            {
                "format": FORMAT,
                "title": self.title,
                "pipeline_size": self.placement.num_ranks,
                "num_chunks": self.placement.num_chunks,
                "placement": self.placement.shape.value,
                "num_microbatches": self.num_microbatches,
                "unit": self.unit,
                "spans": [
                    [s.rank, SHORT_NAME[s.step.op], s.step.microbatch, s.step.chunk, s.start, s.end]
                    for s in self.spans
                ],
            }
        )

    def to_chrome_json(self) -> str:
        """Return the trace in the Trace Event Format that chrome://tracing and Perfetto open."""
        microseconds = 1e6 if self.unit == "s" else 1e3
        origin = min((span.start for span in self.spans), default=0.0)
        events: list[dict[str, Any]] = [
            {"name": "process_name", "ph": "M", "pid": rank, "args": {"name": f"pp rank {rank}"}}
            for rank in range(self.placement.num_ranks)
        ]
        for span in self.spans:
            events.append(
                {
                    "name": span.step.label(self.placement.num_chunks),
                    "cat": span.step.op.name.lower(),
                    "ph": "X",
                    "pid": span.rank,
                    "tid": 0,
                    "ts": (span.start - origin) * microseconds,
                    "dur": (span.end - span.start) * microseconds,
                    "args": {"microbatch": span.step.microbatch, "chunk": span.step.chunk},
                }
            )
        return json.dumps({"traceEvents": events, "displayTimeUnit": "ms"})


def planned_trace(program: Program, costs: Costs | None = None, unit: str = "") -> Trace:
    """Return the simulated timeline of a program; `unit` is that of the costs."""
    placement = program.placement
    result = simulate(program, costs)
    title = (
        f"plan: {program.schedule}, p={placement.num_ranks}, v={placement.num_chunks}, "
        f"m={program.num_microbatches}"
    )
    return Trace(title, placement, program.num_microbatches, unit, result.spans)


def load_trace(path: str | Path) -> Trace:
    """Read a trace written with `Trace.to_json`.

    Raises:
        DataError: the file is not such a trace.
    """
    try:
        content = parse_json(Path(path).read_bytes())
        if content.get("format") != FORMAT:
            raise ValueError(f"its format is {content.get('format')!r}")
        placement = Placement(
            content["pipeline_size"], content["num_chunks"], PlacementShape(content["placement"])
        )
        spans = [
            Span(rank, Step(_OP_OF_NAME[op], microbatch, chunk), start, end)
            for rank, op, microbatch, chunk, start, end in content["spans"]
        ]
        return Trace(
            content["title"], placement, content["num_microbatches"], content["unit"], spans
        )
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as problem:
        raise DataError(
            f"{path} is not a pipeline trace: {problem}.",
            rule=f"a trace is JSON with format {FORMAT!r}",
            fix="write it with Trace.to_json, or record one with PipelineRecorder",
        ) from problem
