"""Make one page of HTML about a run, which opens without a network.

    python tools/report.py run                       # writes run/report.html
    python tools/report.py run --against other_run --out report.html

RUN is a directory with what the run wrote: --metrics-jsonl or --tensorboard-dir for the curves,
--save for settings, checkpoints and failures; or a file of --metrics-jsonl alone.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from megatron.core.foundation.exit_status import ExitStatus, tool
from megatron.core.settings.command_line import read_command_line
from megatron.core.settings.flags import positional
from megatron.training.reports.run_page import run_page
from megatron.training.reports.run_record import read_run


@dataclass(frozen=True, kw_only=True)
class Flags:
    """What the page is about."""

    run: Path = positional(metavar="RUN")
    """Directory of a run, or its file of --metrics-jsonl."""
    against: Path | None = None
    """Another run, whose settings are compared."""
    out: Path | None = None
    """The page. Default: report.html in the directory, or beside the file."""


@tool
def main(arguments: Sequence[str] | None = None) -> int:
    """Write the page; return the exit status."""
    options = read_command_line(Flags, arguments, description=__doc__)
    page = run_page(
        read_run(options.run), None if options.against is None else read_run(options.against)
    )
    directory = options.run if options.run.is_dir() else options.run.parent
    out = options.out or directory / "report.html"
    out.parent.mkdir(parents=True, exist_ok=True)
    out.write_text(page, encoding="utf-8")
    print(f"wrote {out}")
    return ExitStatus.DONE


if __name__ == "__main__":
    sys.exit(main())
