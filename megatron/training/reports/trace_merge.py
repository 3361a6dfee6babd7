"""Traces of several ranks as one, on one clock, with their collectives side by side."""

from __future__ import annotations

import gzip
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megatron.core.foundation.errors import DataError
from megatron.core.foundation.json_text import parse_json
from megatron.training.reports.trace_clocks import (
    ClockOffset,
    CollectiveTimes,
    OfRanks,
    clock_offsets,
    is_synchronising,
    matched,
)

_PROCESSES_OF_RANK = 100
"""Numbers of processes of a merged trace that belong to one rank: the host, then its devices."""
_FIRST_LANE = 1_000_000
"""Number of the first thread that shows collectives."""
_METADATA = (
    "process_name", "process_labels", "process_sort_index", "thread_name", "thread_sort_index",
)  # fmt: skip
_KEPT_PHASES = ("X", "i", "s", "t", "f")


@dataclass(frozen=True)
class RankTrace:
    """A trace that `--profile` wrote on one rank."""

    rank: int
    host: str
    base_ns: int
    """To which the times of its events, in microseconds, are added."""
    events: list[dict[str, Any]]
    collectives: list[CollectiveTimes]


@dataclass(frozen=True)
class MergedTrace:
    """One trace of all ranks, and what was found on the way."""

    content: dict[str, Any]
    """In the Trace Event Format."""
    offsets: dict[int, ClockOffset]
    operations: list[OfRanks]
    """Those that several ranks saw, on one clock."""

    def num_aligned(self) -> tuple[int, int]:
        """Return how many operations that all enter before any leaves are so, and how many."""
        synchronising = [each for each in self.operations if is_synchronising(each)]
        aligned = [
            max(t.start_ns for t in each.values()) <= min(t.end_ns for t in each.values())
            for each in synchronising
        ]
        return sum(aligned), len(synchronising)

    def waited_for_s(self) -> dict[int, float]:
        """Return rank -> seconds that the others waited because it entered an operation last."""
        seconds = dict.fromkeys(self.offsets, 0.0)
        for operation in filter(is_synchronising, self.operations):
            last = _last_to_enter(operation)
            others = (t.start_ns for rank, t in operation.items() if rank != last)
            seconds[last] += sum(operation[last].start_ns - start for start in others) / 1e9
        return seconds


def read_trace(path: Path) -> RankTrace:
    """Read the trace of a rank.

    Raises:
        DataError: the file is not one of `--profile`, or of another kind.
    """
    try:
        content = parse_json(path.read_bytes())
        about = content.get("distributedInfo", {"rank": 0})
        collectives = [
            CollectiveTimes(**{**each, "ranks": tuple(each["ranks"])})
            for each in content.get("collectives", ())
        ]
        return RankTrace(
            rank=int(about["rank"]),
            host=str(content.get("host_name", "")),
            base_ns=int(content.get("baseTimeNanoseconds", 0)),
            events=list(content["traceEvents"]),
            collectives=collectives,
        )
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise DataError(
            f"{path} is not the trace of a rank: {error}.",
            rule="the traces are those that --profile writes with torch.profiler",
            flags=["--profile", "--profile-ranks", "--use-pytorch-profiler"],
            fix="name the directory of trace-rank*.json",
        ) from error


def find_traces(directory: Path) -> list[Path]:
    """Return the traces of a run, in its directory or one level below.

    Raises:
        DataError: there are none.
    """
    found = sorted([*directory.glob("trace-rank*.json"), *directory.glob("*/trace-rank*.json")])
    if not found:
        raise DataError(
            f"{directory} has no traces.",
            rule="--profile writes a trace-rank*.json for each of --profile-ranks",
            flags=["--profile", "--profile-ranks"],
            fix="profile some steps on the ranks to compare: --profile --profile-ranks 0 1 2 3",
        )
    return found


def merge_traces(traces: Sequence[RankTrace]) -> MergedTrace:
    """Put traces on the clock of the first, and their collectives on threads of their own.

    Raises:
        DataError: two traces are of one rank.
    """
    traces = sorted(traces, key=lambda trace: trace.rank)
    ranks = [trace.rank for trace in traces]
    if len(set(ranks)) < len(ranks):
        raise DataError(
            f"traces of ranks {ranks}: several of one rank.",
            rule="traces are merged of one run and the same steps",
            fix="remove the traces of other runs from the directory",
        )
    seen = matched({trace.rank: trace.collectives for trace in traces})
    offsets = clock_offsets(seen, ranks)
    shifted = {
        trace.rank: [_shifted(each, offsets[trace.rank]) for each in trace.collectives]
        for trace in traces
    }
    operations = matched(shifted)
    origin = min(
        trace.base_ns + round(1e3 * event["ts"]) + round(offsets[trace.rank].offset_ns)
        for trace in traces
        for event in trace.events
        if event.get("ph") == "X" and type(event.get("pid")) is int
    )
    events: list[dict[str, Any]] = []
    threads: dict[tuple[int, tuple[object, ...]], int] = {}
    for trace in traces:
        shift_us = (trace.base_ns + round(offsets[trace.rank].offset_ns) - origin) / 1e3
        lanes = _Lanes(trace.rank)
        of_rank = list(_events_of_rank(trace, shift_us, len(traces)))
        _move_overlapping(of_rank, lanes)
        of_rank += _collectives_of_rank(trace.rank, shifted[trace.rank], origin, lanes, threads)
        events += [*lanes.names, *of_rank]
    events += _arrows(operations, origin, threads)
    content = {
        "displayTimeUnit": "ms",
        "traceEvents": events,
        "clockOffsetsMicroseconds": {rank: o.offset_ns / 1e3 for rank, o in offsets.items()},
    }
    return MergedTrace(content, offsets, operations)


def write_trace(content: Mapping[str, Any], path: Path) -> None:
    """Write a trace as JSON, compressed if the name ends in .gz; Perfetto opens both."""
    text = json.dumps(content, separators=(",", ":")).encode()
    path.write_bytes(gzip.compress(text, 6) if path.suffix == ".gz" else text)


def _shifted(times: CollectiveTimes, offset: ClockOffset) -> CollectiveTimes:
    values = vars(times).copy()
    shift = round(offset.offset_ns)
    return CollectiveTimes(
        **{**values, "start_ns": times.start_ns + shift, "end_ns": times.end_ns + shift}
    )


def _last_to_enter(operation: OfRanks) -> int:
    return max(operation, key=lambda rank: operation[rank].start_ns)


def _events_of_rank(trace: RankTrace, shift_us: float, num_ranks: int) -> Iterator[dict[str, Any]]:
    """Yield the events of a trace with other processes and arrows' numbers, on the common clock."""
    processes: dict[int, int] = {}
    for event in trace.events:
        phase, pid, tid = event.get("ph"), event.get("pid"), event.get("tid")
        # torch adds two that are about the profile itself, with words in place of numbers.
        if type(pid) is not int or type(tid) is not int:
            continue
        is_metadata = phase == "M" and event.get("name") in _METADATA
        if not is_metadata and phase not in _KEPT_PHASES:
            continue
        moved = _PROCESSES_OF_RANK * trace.rank + processes.setdefault(pid, len(processes))
        new = {**event, "pid": moved}
        if "ts" in event:
            new["ts"] = round(event["ts"] + shift_us, 3) if not is_metadata else 0
        if "id" in event and isinstance(event["id"], int):
            new["id"] = event["id"] * num_ranks + trace.rank
        if is_metadata and event["name"] == "process_name":
            device = "" if moved % _PROCESSES_OF_RANK == 0 else f" {event['args'].get('name', '')}"
            new["args"] = {"name": f"rank {trace.rank}{device} ({trace.host})"}
        if is_metadata and event["name"] == "process_sort_index":
            new["args"] = {"sort_index": moved}
        yield new


class _Lanes:
    """Threads of one rank for slices that overlap: on none does one begin before another ends."""

    def __init__(self, rank: int) -> None:
        self._pid = _PROCESSES_OF_RANK * rank
        self._busy_until: dict[str, list[tuple[float, int]]] = {}
        self.names: list[dict[str, Any]] = []
        """The metadata that name the threads."""

    def thread_for(self, name: str, start: float, end: float) -> int:
        """Return a thread of this name that is free; slices come in the order of their starts."""
        lanes = self._busy_until.setdefault(name, [])
        index = next((i for i, (busy, _) in enumerate(lanes) if busy <= start), len(lanes))
        if index == len(lanes):
            tid = _FIRST_LANE + len(self.names)
            lanes.append((end, tid))
            about = {"pid": self._pid, "tid": tid, "args": {"name": name}}
            self.names.append({"ph": "M", "name": "thread_name", **about})
        tid = lanes[index][1]
        lanes[index] = end, tid
        return tid


def _move_overlapping(events: Sequence[dict[str, Any]], lanes: _Lanes) -> None:
    """Give threads of their own to slices that are neither inside nor apart from their neighbours.

    torch marks work in flight on the thread that started it, where other calls go on.
    """
    ends: dict[tuple[int, int], list[float]] = {}
    slices = (event for event in events if event["ph"] == "X")
    for event in sorted(slices, key=lambda event: (event["ts"], -event["dur"])):
        start, end = event["ts"], event["ts"] + event["dur"]
        outer = ends.setdefault((event["pid"], event["tid"]), [])
        while outer and outer[-1] <= start:
            outer.pop()
        if outer and end > outer[-1] + 1e-3:
            event["tid"] = lanes.thread_for("work in flight", start, end)
        else:
            outer.append(end)


def _collectives_of_rank(
    rank: int,
    operations: Sequence[CollectiveTimes],
    origin: int,
    lanes: _Lanes,
    threads: dict[tuple[int, tuple[object, ...]], int],
) -> Iterator[dict[str, Any]]:
    """Yield a slice for each operation.

    Args:
        threads: takes (rank, key of the operation) -> thread.
    """
    for each in sorted(operations, key=lambda each: each.start_ns):
        name = f"{each.group} {list(each.ranks)}" if len(each.ranks) <= 8 else each.group
        tid = threads[rank, each.key] = lanes.thread_for(name, each.start_ns, each.end_ns)
        yield {
            "ph": "X",
            "cat": "collective",
            "name": f"{each.operation} {each.number}",
            "pid": _PROCESSES_OF_RANK * rank,
            "tid": tid,
            "ts": (each.start_ns - origin) / 1e3,
            "dur": (each.end_ns - each.start_ns) / 1e3,
            "args": {"group": each.group, "ranks": list(each.ranks), "tag": each.tag,
                     "elements": each.num_elements},
        }  # fmt: skip


def _arrows(
    operations: Sequence[OfRanks],
    origin: int,
    threads: Mapping[tuple[int, tuple[object, ...]], int],
) -> Iterator[dict[str, Any]]:
    """Yield an arrow from the rank that entered last to each that waited for it."""
    number = 0
    for operation in filter(is_synchronising, operations):
        last = _last_to_enter(operation)
        time = operation[last].start_ns
        for rank, times in operation.items():
            if rank == last or not times.start_ns <= time <= times.end_ns:
                continue
            number += 1
            for phase, at in (("s", last), ("f", rank)):
                arrow = {"ph": phase, "cat": "waited for", "name": "entered last", "id": number,
                         "pid": _PROCESSES_OF_RANK * at, "tid": threads[at, times.key],
                         "ts": (time - origin) / 1e3}  # fmt: skip
                yield arrow | ({"bp": "e"} if phase == "f" else {})
