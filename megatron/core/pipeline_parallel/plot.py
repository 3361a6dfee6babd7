"""Draw pipelines: as text, SVG or PNG, planned or measured, in the same picture.

No torch; PNG needs matplotlib. Rows are pipeline ranks, time goes to the right. `F3` is the
forward of micro batch 3, `B` its backward, `I` and `W` the halves of a split backward; with more
than one chunk a rank, `F3.1` is its chunk 1.
"""

from __future__ import annotations

from collections.abc import Sequence
from html import escape
from pathlib import Path

from megatron.core.foundation import optional_imports
from megatron.core.foundation.errors import ConfigError
from megatron.core.pipeline_parallel.instructions import Op, Program, Step
from megatron.core.pipeline_parallel.trace import Trace

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
_ROW_HEIGHT, _LEFT, _TOP, _PANEL_GAP, _WIDTH = 26, 64, 34, 30, 1180


def order_text(program: Program, marked: dict[int, Step], width: int = 16) -> str:
    """Return the compute steps of all ranks in program order, with marked cells in brackets.

    Args:
        program: any program, also a wrong one.
        marked: rank -> step to point at; a communication step points at its compute step.
        width: number of columns shown around the first marked cell.
    """
    rows = []
    chunks = program.placement.num_chunks
    centre = None
    for rank in range(program.placement.num_ranks):
        cells = [step.label(chunks) for step in program.compute_steps(rank)]
        if rank in marked:
            index = _nearest_compute_step(program, rank, marked[rank])
            if index is None:
                cells.append(f"[{marked[rank].label(chunks)}]")
                index = len(cells) - 1
            else:
                cells[index] = f"[{cells[index]}]"
            centre = index if centre is None else centre
        rows.append(cells)
    first = max(0, (centre or 0) - width // 2)
    cell_width = max((len(cell) for row in rows for cell in row), default=1) + 1
    lines = []
    for rank, row in enumerate(rows):
        shown = "".join(cell.ljust(cell_width) for cell in row[first : first + width])
        left = "... " if first else ""
        right = "..." if len(row) > first + width else ""
        lines.append(f"rank {rank:>2} | {left}{shown}{right}".rstrip())
    return "\n".join(lines)


def _nearest_compute_step(program: Program, rank: int, step: Step) -> int | None:
    """Return the position among the compute steps that a step belongs to."""
    forward = step.op in (Op.FORWARD, Op.RECV_ACTIVATION, Op.SEND_ACTIVATION, Op.FREE_OUTPUT)
    for index, candidate in enumerate(program.compute_steps(rank)):
        same = (candidate.microbatch, candidate.chunk) == (step.microbatch, step.chunk)
        if same and (candidate.op is step.op or (candidate.op is Op.FORWARD) == forward):
            return index
    return None


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


def svg(traces: Sequence[Trace]) -> str:
    """Return an SVG document with one panel per trace.

    Panels of one unit have one time scale: a plan and a run drawn together show at a glance where
    the run lost time.
    """
    parts: list[str] = []
    x = float(_LEFT)
    for text, colour in _legend(traces):
        parts.append(f'<rect x="{x}" y="8" width="14" height="14" fill="rgb{colour}"/>')
        parts.append(f'<text x="{x + 19}" y="19">{text}</text>')
        x += 40 + 6.5 * len(text)
    top = 26
    for trace in traces:
        parts.extend(_svg_panel(trace, top, _WIDTH / _common_makespan(trace, traces)))
        top += _TOP + _ROW_HEIGHT * trace.placement.num_ranks + _PANEL_GAP
    head = (
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{_LEFT + _WIDTH + 20}" height="{top}" '
        'font-family="Helvetica, Arial, sans-serif" font-size="11">'
    )
    background = '<rect width="100%" height="100%" fill="white"/>'
    return "\n".join([head, background, *parts, "</svg>", ""])


def _legend(traces: Sequence[Trace]) -> list[tuple[str, tuple[int, int, int]]]:
    """Return what the colours of these traces mean: ops, and chunks where a rank has several."""
    used = {span.step.op for trace in traces for span in trace.spans}
    entries = [(name, _COLOUR[op]) for op, name in _NAME.items() if op in used]
    chunks = max((trace.placement.num_chunks for trace in traces), default=1)
    if chunks > 1:
        entries += [(f"F of chunk {c}", _shade(Op.FORWARD, c, chunks)) for c in range(1, chunks)]
    return entries


def _common_makespan(trace: Trace, traces: Sequence[Trace]) -> float:
    """Return the longest makespan among the traces with the unit of `trace`."""
    return max(other.report().makespan for other in traces if other.unit == trace.unit) or 1.0


def _svg_panel(trace: Trace, top: float, scale: float) -> list[str]:
    origin = min((span.start for span in trace.spans), default=0.0)
    chunks = trace.placement.num_chunks
    body = top + _TOP
    parts = [
        f'<text x="{_LEFT}" y="{top + 18}" font-size="13" font-weight="bold">'
        f"{escape(caption(trace))}</text>"
    ]
    for rank in range(trace.placement.num_ranks):
        y = body + rank * _ROW_HEIGHT
        parts.append(f'<text x="8" y="{y + 17}">rank {rank}</text>')
        parts.append(
            f'<rect x="{_LEFT}" y="{y + 1}" width="{_WIDTH}" height="{_ROW_HEIGHT - 2}" '
            'fill="#eeeeee"/>'
        )
    for span in trace.spans:
        x, width = _LEFT + (span.start - origin) * scale, (span.end - span.start) * scale
        y = body + span.rank * _ROW_HEIGHT + 1
        label = span.step.label(chunks)
        colour = _shade(span.step.op, span.step.chunk, chunks)
        parts.append(
            f'<rect x="{x:.2f}" y="{y}" width="{max(width, 0.3):.2f}" height="{_ROW_HEIGHT - 2}" '
            f'fill="rgb{colour}" stroke="white" stroke-width="0.5">'
            f"<title>{label}: {span.start - origin:.6g} to {span.end - origin:.6g}"
            f"{' ' + trace.unit if trace.unit else ''}</title></rect>"
        )
        if width > 6.5 * len(label):
            parts.append(
                f'<text x="{x + width / 2:.2f}" y="{y + 16}" fill="{_ink(colour)}" '
                f'text-anchor="middle">{label}</text>'
            )
    return parts


def _shade(op: Op, chunk: int, num_chunks: int) -> tuple[int, int, int]:
    """Return the colour of an op, lighter for later chunks."""
    lighten = 0.45 * chunk / max(1, num_chunks - 1)
    red, green, blue = (round(c + (255 - c) * lighten) for c in _COLOUR[op])
    return red, green, blue


def _ink(colour: tuple[int, int, int]) -> str:
    """Return the colour of a label that is readable on a box of the given colour."""
    red, green, blue = colour
    return "white" if 0.3 * red + 0.6 * green + 0.1 * blue < 150 else "black"


def save_png(traces: Sequence[Trace], path: str | Path) -> None:
    """Write the panels of `svg` as a PNG with matplotlib."""
    purpose = "drawing a pipeline as PNG"
    figures = optional_imports.require("matplotlib.figure", purpose=purpose)
    patches = optional_imports.require("matplotlib.patches", purpose=purpose)
    canvases = optional_imports.require("matplotlib.backends.backend_agg", purpose=purpose)

    rows = sum(trace.placement.num_ranks + 2 for trace in traces)
    figure = figures.Figure(figsize=(14, 0.45 * rows + 0.8), layout="constrained")
    canvases.FigureCanvasAgg(figure)
    panels = figure.subplots(len(traces), 1, squeeze=False)
    for axis, trace in zip(panels[:, 0], traces, strict=True):
        origin = min((span.start for span in trace.spans), default=0.0)
        width = _common_makespan(trace, traces)
        for span in trace.spans:
            label = span.step.label(trace.placement.num_chunks)
            colour = _shade(span.step.op, span.step.chunk, trace.placement.num_chunks)
            start, length = span.start - origin, span.end - span.start
            paint = [part / 255 for part in colour]
            axis.barh(span.rank, length, left=start, height=0.92, color=paint, edgecolor="white")
            if length / width > 0.004 * len(label):
                place = (start + length / 2, span.rank)
                axis.text(*place, label, ha="center", va="center", color=_ink(colour), fontsize=7)
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
    figure.savefig(path, dpi=130)


def save(traces: Sequence[Trace], path: str | Path) -> None:
    """Write traces to a file whose suffix says how: .svg, .png, .txt, .json or .chrome.json.

    The JSON forms hold one trace, the last one given.
    """
    path = Path(path)
    if path.suffix == ".png":
        save_png(traces, path)
    elif path.suffix == ".svg":
        path.write_text(svg(traces))
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
