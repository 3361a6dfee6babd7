"""Check a trace against the Trace Event Format, as Perfetto and chrome://tracing read it."""

import math
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

METADATA = (
    "process_name", "process_labels", "process_sort_index", "thread_name", "thread_sort_index",
)  # fmt: skip
"""Names that metadata events have."""
_NUMBERS = {
    "X": ("ts", "dur"),
    "i": ("ts",),
    "s": ("ts",),
    "t": ("ts",),
    "f": ("ts",),
    "C": ("ts",),
}
"""Phase -> fields that are numbers; M has none."""
_ROUNDING_US = 0.002
"""By which slices of one thread may overlap: their times are decimal fractions of microseconds."""


def trace_problems(trace: Mapping[str, Any]) -> Iterator[str]:
    """Yield what is wrong with a trace.

    Each event must have the fields of its phase, with process and thread as whole numbers; slices
    of a thread must be nested or apart; each end of an arrow must have a beginning before it, and
    both must be inside a slice.
    """
    events = trace.get("traceEvents")
    if not isinstance(events, list):
        yield "there is no list of traceEvents"
        return
    slices: dict[tuple[int, int], list[tuple[float, float, str]]] = defaultdict(list)
    arrows: dict[object, list[Mapping[str, Any]]] = defaultdict(list)
    for event in events:
        problem = _problem_of(event)
        if problem:
            yield f"{problem}: {event}"
        elif event["ph"] == "X":
            where = event["pid"], event["tid"]
            slices[where].append((event["ts"], event["ts"] + event["dur"], event["name"]))
        elif event["ph"] in "stf":
            arrows[event["cat"], event["id"]].append(event)
    for where, of_thread in slices.items():
        of_thread.sort(key=lambda each: (each[0], -each[1]))
        yield from _overlaps(where, of_thread)
    for of_arrow in arrows.values():
        yield from _arrow_problems(of_arrow, slices)


def _problem_of(event: Mapping[str, Any]) -> str:
    phase = event.get("ph")
    if not isinstance(event.get("name"), str):
        return "an event without a name"
    if not all(type(event.get(field)) is int for field in ("pid", "tid")):
        return "process or thread is no whole number"
    if phase == "M":
        return "" if event["name"] in METADATA and event.get("args") else "unknown metadata"
    if phase not in _NUMBERS:
        return f"phase {phase!r} is not used here"
    for field in _NUMBERS[phase]:
        value = event.get(field)
        if not isinstance(value, int | float) or not math.isfinite(value) or value < 0:
            return f"{field} is no time"
    if phase in "stf" and ("id" not in event or "cat" not in event):
        return "an arrow without id or category"
    return ""


def _overlaps(where: tuple[int, int], slices: Sequence[tuple[float, float, str]]) -> Iterator[str]:
    open_slices: list[tuple[float, str]] = []
    for start, end, name in slices:
        while open_slices and open_slices[-1][0] <= start + _ROUNDING_US:
            open_slices.pop()
        if open_slices and end > open_slices[-1][0] + _ROUNDING_US:
            yield f"{name!r} of thread {where} ends after {open_slices[-1][1]!r}, in which it began"
        open_slices.append((end, name))


def _arrow_problems(
    events: Sequence[Mapping[str, Any]],
    slices: Mapping[tuple[int, int], Sequence[tuple[float, float, str]]],
) -> Iterator[str]:
    phases = sorted(event["ph"] for event in events)
    if phases.count("s") != 1 or phases.count("f") != 1:
        yield f"an arrow with phases {phases}: {events[0]}"
        return
    begin = next(event for event in events if event["ph"] == "s")
    for event in events:
        if event["ts"] < begin["ts"]:
            yield f"an arrow that ends before it begins: {event}"
        inside = slices.get((event["pid"], event["tid"]), ())
        time = event["ts"]
        if not any(a - _ROUNDING_US <= time <= b + _ROUNDING_US for a, b, _ in inside):
            yield f"an arrow outside of every slice: {event}"
