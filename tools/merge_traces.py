"""Merge the traces of several ranks into one for https://ui.perfetto.dev, on one clock.

    python pretrain_gpt.py ... --profile --profile-ranks 0 1 2 3 --save run
    python tools/merge_traces.py run                   # writes run/trace-merged.json.gz

RUN is the directory of trace-rank*.json, or one above it. The clocks of the ranks are aligned by
the collectives in them. Arrows lead from the rank that entered a collective last to the others.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from megatron.core.foundation.exit_status import ExitStatus, tool
from megatron.core.settings.command_line import read_command_line
from megatron.core.settings.flags import positional
from megatron.training.reports.trace_merge import (
    MergedTrace,
    find_traces,
    merge_traces,
    read_trace,
    write_trace,
)


@dataclass(frozen=True, kw_only=True)
class Flags:
    """What is merged."""

    run: Path = positional(metavar="RUN")
    """Directory with the traces of a run."""
    out: Path | None = None
    """The merged trace: .json, or .json.gz. Default: trace-merged.json.gz beside the traces."""


def summary(merged: MergedTrace) -> str:
    """Return what the clocks of the ranks were, and who was waited for."""
    lines = ["rank  clock is moved by (us)  can be wrong by (us)  others waited for it (ms)"]
    waited = merged.waited_for_s()
    for rank, offset in merged.offsets.items():
        moved, wrong = offset.offset_ns / 1e3, offset.uncertainty_ns / 1e3
        lines.append(f"{rank:4}  {moved:22.1f}  {wrong:20.1f}  {1e3 * waited[rank]:24.2f}")
    aligned, number = merged.num_aligned()
    lines.append(f"{aligned} of {number} collectives line up: all ranks are in before one is out")
    return "\n".join(lines)


@tool
def main(arguments: Sequence[str] | None = None) -> int:
    """Write the merged trace; return the exit status."""
    options = read_command_line(Flags, arguments, description=__doc__)
    paths = find_traces(options.run)
    merged = merge_traces([read_trace(path) for path in paths])
    out = options.out or paths[0].with_name("trace-merged.json.gz")
    write_trace(merged.content, out)
    print(summary(merged))
    print(f"wrote {out}")
    aligned, number = merged.num_aligned()
    return ExitStatus.DONE if aligned == number else ExitStatus.FAILED


if __name__ == "__main__":
    sys.exit(main())
