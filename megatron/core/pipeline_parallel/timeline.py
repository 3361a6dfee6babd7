"""A timeline of a pipeline, planned or measured: its file formats, and pictures of it.

No torch; SVG and PNG need matplotlib. Planned and measured timelines hold the same spans, so
pictures and `simulate.report` work for both. In pictures each line is a pipeline rank, and time
runs to the right. `F3` is the forward of micro batch 3, `B` its backward, `I` and `W` the halves of
a split backward; with several chunks per rank, `F3.1` is the forward of chunk 1.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megatron.core.foundation import optional_imports
from megatron.core.foundation.errors import ConfigError, DataError
from megatron.core.foundation.json_text import parse_json
from megatron.core.pipeline_parallel.instructions import (
    SHORT_NAME,
    Op,
    Placement,
    PlacementShape,
    Program,
    Step,
)
from megatron.core.pipeline_parallel.simulate import Costs, Report, Span, report, simulate

FORMAT = "lattice-pipeline-trace-1"
_OP_OF_NAME = {name: op for op, name in SHORT_NAME.items()}
# Forward blue, full backward green, input gradient teal, weight gradient amber.
_COLOUR = {
    Op.FORWARD: (76, 120, 190),
    Op.BACKWARD: (84, 162, 75),
    Op.INPUT_GRAD: (57, 150, 150),
    Op.WEIGHT_GRAD: (214, 160, 50),
}
_NAME = {
    Op.FORWARD: "F: forward",
    Op.BACKWARD: "B: backward",
    Op.INPUT_GRAD: "I: gradient of the input",
    Op.WEIGHT_GRAD: "W: gradient of the weights",
}
_FILL = {Op.FORWARD: "-", Op.BACKWARD: "=", Op.INPUT_GRAD: "~", Op.WEIGHT_GRAD: "+"}


@dataclass(frozen=True)
class Trace:
    """Compute steps of all ranks of one pipeline with their times.

    Attributes:
        title: heading of the picture.
        placement: rank of each stage.
        num_microbatches: m.
        unit: unit of the times: "s" for a measured timeline, "" for a plan.
        spans: one per compute step.
    """

    title: str
    placement: Placement
    num_microbatches: int
    unit: str
    spans: list[Span]

    def report(self) -> Report:
        """Return makespan, bubble and peak live activations."""
        return report(self.spans, self.placement.num_ranks)

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
    """Return the simulated timeline of a program; `unit` is the unit of the costs."""
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
        DataError: the file is not a trace.
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


def timeline_text(trace: Trace, width: int | None = None) -> str:
    """Return one line of characters per rank; dots are idle time.

    Args:
        trace: planned or measured.
        width: characters for the whole time; by default enough for every label.
    """
    if not trace.spans:
        return ""
    origin = min(span.start for span in trace.spans)
    makespan = max(span.end for span in trace.spans) - origin
    chunks = trace.placement.num_chunks
    if width is None:
        longest = max(len(span.step.label(chunks)) for span in trace.spans) + 1
        shortest = min(span.end - span.start for span in trace.spans)
        width = min(400, round(makespan / max(shortest, makespan / 400) * longest))
    scale = width / makespan if makespan else 0.0
    rows = [["."] * width for _ in range(trace.placement.num_ranks)]
    for span in trace.spans:
        first, last = round((span.start - origin) * scale), round((span.end - origin) * scale)
        text = span.step.label(chunks).ljust(last - first, _FILL[span.step.op])
        if last - first > len(span.step.label(chunks)):
            text = text[: last - first - 1] + " "  # neighbours stay apart
        rows[span.rank][first:last] = text[: last - first]
    lines = [f"rank {rank:>2} | {''.join(row)}".rstrip() for rank, row in enumerate(rows)]
    return "\n".join([caption(trace), *lines])


def caption(trace: Trace) -> str:
    """Return title, makespan, bubble and peak live activations in one line."""
    summary = trace.report()
    unit = f" {trace.unit}" if trace.unit else ""
    peak = summary.peak_live_activations
    return (
        f"{trace.title} | makespan {summary.makespan:.4g}{unit} | bubble {summary.bubble:.1%} | "
        f"peak live activations {', '.join(str(n) for n in peak)}"
    )


def _legend(traces: Sequence[Trace]) -> list[tuple[str, tuple[int, int, int]]]:
    """Return (text, colour) of the ops in these traces, and of the chunks if there are several."""
    used = {span.step.op for trace in traces for span in trace.spans}
    entries = [(name, _COLOUR[op]) for op, name in _NAME.items() if op in used]
    chunks = max((trace.placement.num_chunks for trace in traces), default=1)
    if chunks > 1:
        entries += [(f"F of chunk {c}", _shade(Op.FORWARD, c, chunks)) for c in range(1, chunks)]
    return entries


def _shade(op: Op, chunk: int, num_chunks: int) -> tuple[int, int, int]:
    """Return the colour of an op, lighter for later chunks."""
    lighten = 0.45 * chunk / max(1, num_chunks - 1)
    red, green, blue = (round(c + (255 - c) * lighten) for c in _COLOUR[op])
    return red, green, blue


def draw(traces: Sequence[Trace], path: str | Path) -> None:
    """Draw one panel per trace with matplotlib; the suffix of the path is .svg or .png.

    Panels with the same unit share a time scale, so that a plan and a run can be compared.
    """
    purpose = "drawing a pipeline"
    matplotlib = optional_imports.require("matplotlib", purpose=purpose)
    figures = optional_imports.require("matplotlib.figure", purpose=purpose)
    patches = optional_imports.require("matplotlib.patches", purpose=purpose)

    rows = sum(trace.placement.num_ranks + 2 for trace in traces)
    figure = figures.Figure(figsize=(14, 0.45 * rows + 0.8), layout="constrained")
    panels = figure.subplots(len(traces), 1, squeeze=False)
    for axis, trace in zip(panels[:, 0], traces, strict=True):
        origin = min((span.start for span in trace.spans), default=0.0)
        # Traces with the same unit have a common scale.
        width = max(t.report().makespan for t in traces if t.unit == trace.unit) or 1.0
        for span in trace.spans:
            label = span.step.label(trace.placement.num_chunks)
            colour = _shade(span.step.op, span.step.chunk, trace.placement.num_chunks)
            start, length = span.start - origin, span.end - span.start
            paint = [part / 255 for part in colour]
            axis.barh(span.rank, length, left=start, height=0.92, color=paint, edgecolor="white")
            if length / width > 0.004 * len(label):
                place = (start + length / 2, span.rank)
                red, green, blue = colour  # the ink contrasts with the box
                ink = "white" if 0.3 * red + 0.6 * green + 0.1 * blue < 150 else "black"
                axis.text(*place, label, ha="center", va="center", color=ink, fontsize=7)
        axis.set_title(caption(trace), fontsize=9, loc="left")
        axis.set_xlim(0, width)
        axis.set_yticks(range(trace.placement.num_ranks))
        axis.set_yticklabels([f"rank {rank}" for rank in range(trace.placement.num_ranks)])
        axis.invert_yaxis()
        axis.set_xlabel(trace.unit or "time (unit of --forward-cost)", fontsize=8)
    entries = [
        patches.Patch(color=[part / 255 for part in colour], label=text)
        for text, colour in _legend(traces)
    ]
    figure.legend(handles=entries, loc="outside upper left", ncols=len(entries), fontsize=8)
    with matplotlib.rc_context({"svg.fonttype": "none"}):  # text stays text
        figure.savefig(path, dpi=130)


def save(traces: Sequence[Trace], path: str | Path) -> None:
    """Write traces to a file; its suffix selects .svg, .png, .txt, .json or .chrome.json.

    A JSON file holds one trace: the last of `traces`.
    """
    path = Path(path)
    if path.suffix in (".png", ".svg"):
        draw(traces, path)
    elif path.suffix == ".txt":
        path.write_text("\n\n".join(timeline_text(trace) for trace in traces) + "\n")
    elif path.name.endswith(".chrome.json"):
        path.write_text(traces[-1].to_chrome_json())
    elif path.suffix == ".json":
        path.write_text(traces[-1].to_json())
    else:
        raise ConfigError(
            f"a pipeline picture cannot be written to {path.name!r}.",
            rule="the suffix chooses the format",
            flags=["--out"],
            fix="use a name ending in .svg, .png, .txt, .json or .chrome.json",
        )
