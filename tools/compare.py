"""Compare two runs: losses and gradient norms to the bit, settings, speed, memory.

    python tools/compare.py run other_run
    python tools/compare.py run other_run --out comparison.html     # and the curves of both

A run is a directory with what it wrote, or its file of --metrics-jsonl, which has all digits.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from megatron.core.foundation.exit_status import ExitStatus, tool
from megatron.core.settings.command_line import read_command_line
from megatron.core.settings.flags import positional
from megatron.training.reports.comparison import compare_runs, comparison_page, comparison_text
from megatron.training.reports.run_record import read_run


@dataclass(frozen=True, kw_only=True)
class Flags:
    """What is compared."""

    run: Path = positional(metavar="RUN")
    """Directory of a run, or its file of --metrics-jsonl."""
    other: Path = positional(metavar="OTHER")
    """The run to compare it with."""
    out: Path | None = None
    """Also write a page of HTML with the curves of both."""
    check_equal: bool = False
    """End with 1 unless all losses and gradient norms are equal at the steps that both have."""


@tool
def main(arguments: Sequence[str] | None = None) -> int:
    """Print the comparison; return the exit status."""
    options = read_command_line(Flags, arguments, description=__doc__)
    run, other = read_run(options.run), read_run(options.other)
    found = compare_runs(run, other)
    print(comparison_text(found))
    if options.out is not None:
        options.out.parent.mkdir(parents=True, exist_ok=True)
        options.out.write_text(comparison_page(run, other), encoding="utf-8")
        print(f"\nwrote {options.out}")
    is_failed = options.check_equal and not found.curves_are_equal
    return ExitStatus.FAILED if is_failed else ExitStatus.DONE


if __name__ == "__main__":
    sys.exit(main())
