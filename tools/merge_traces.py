"""Merge the traces of several ranks into one file for https://ui.perfetto.dev.

    python pretrain_gpt.py ... --profile --profile-ranks 0 1 2 3 --save run
    python tools/merge_traces.py run                   # writes run/trace-merged.json.gz

RUN is the directory of trace-rank*.json, or its parent. Process numbers become
RANK * 10^8 + process, and process names begin with the rank. Times keep the clock of each machine.
Holistic Trace Analysis reads the directory of trace-rank*.json itself.
"""

from __future__ import annotations

import gzip
import json
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megatron.core.foundation.errors import DataError
from megatron.core.foundation.exit_status import ExitStatus, tool
from megatron.core.settings.command_line import read_command_line
from megatron.core.settings.flags import positional

OF_RANK = 10**8
"""Process numbers of a rank; Linux has at most 2^22, and torch adds small numbers for devices."""


@dataclass(frozen=True, kw_only=True)
class Flags:
    """Traces to merge."""

    run: Path = positional(metavar="RUN")
    """Directory with the traces of a run."""
    out: Path | None = None
    """Merged trace: .json or .json.gz. Default: trace-merged.json.gz next to the traces."""


def read_trace(path: Path) -> tuple[int, int, list[dict[str, Any]]]:
    """Return rank, the time in ns to which event times are added, and the events of a trace.

    Raises:
        DataError: the file is not a trace of `--profile`.
    """
    try:
        content = json.loads(path.read_bytes())
        rank = int(content.get("distributedInfo", {"rank": 0})["rank"])
        return rank, int(content.get("baseTimeNanoseconds", 0)), list(content["traceEvents"])
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise DataError(
            f"{path} is not the trace of a rank: {error}.",
            rule="--profile writes a trace-rank*.json for each of --profile-ranks",
            flags=["--profile", "--profile-ranks"],
            fix="name the directory of trace-rank*.json",
        ) from error


def merge_traces(paths: Sequence[Path]) -> dict[str, Any]:
    """Return one trace with the events of all ranks.

    Raises:
        DataError: a file is not a trace, or a rank has two.
    """
    traces = [read_trace(path) for path in paths]
    if len({rank for rank, _, _ in traces}) < len(traces):
        raise DataError(
            f"two of {', '.join(map(str, paths))} are traces of the same rank.",
            rule="a merged trace is of one run",
            fix="name the directory of one run",
        )
    base_ns = min(base for _, base, _ in traces)
    merged = []
    for rank, of_rank_ns, events in traces:
        for event in events:
            name, pid = event.get("name"), event.get("pid")
            # Arrows and asynchronous events have ids, and other ranks may use the same ids.
            changed = {"id": f"{rank}-{event['id']}"} if "id" in event else {}
            if isinstance(pid, int):
                changed["pid"] = rank * OF_RANK + pid
            elif pid is not None:
                changed["pid"] = f"rank {rank} {pid}"
            if "ts" in event:
                changed["ts"] = event["ts"] + (of_rank_ns - base_ns) / 1e3
            if event.get("ph") == "M" and name == "process_name":
                changed["args"] = {"name": f"rank {rank}: {event['args']['name']}"}
            if event.get("ph") == "M" and name == "process_sort_index":
                changed["args"] = {"sort_index": rank}
            merged.append(event | changed)
    return {"traceEvents": merged, "baseTimeNanoseconds": base_ns, "displayTimeUnit": "ms"}


@tool
def main(arguments: Sequence[str] | None = None) -> int:
    """Write the merged trace; return the exit status."""
    options = read_command_line(Flags, arguments, description=__doc__)
    paths = sorted([*options.run.glob("trace-rank*.json"), *options.run.glob("*/trace-rank*.json")])
    if not paths:
        raise DataError(
            f"{options.run} has no traces.",
            rule="--profile writes a trace-rank*.json for each of --profile-ranks",
            flags=["--profile", "--profile-ranks"],
            fix="profile some steps on the ranks to compare: --profile --profile-ranks 0 1 2 3",
        )
    out = options.out or paths[0].with_name("trace-merged.json.gz")
    text = json.dumps(merge_traces(paths)).encode()
    out.write_bytes(gzip.compress(text) if out.suffix == ".gz" else text)
    print(f"wrote {out}: {len(paths)} ranks")
    return ExitStatus.DONE


if __name__ == "__main__":
    sys.exit(main())
