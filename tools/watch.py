"""Show a run in the terminal while it goes on.

    python tools/watch.py run               # until it ends, or Ctrl-C
    python tools/watch.py run --once        # one picture, for a log or another program

RUN is what tools/report.py takes; the run writes --metrics-jsonl, or --tensorboard-dir.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from megatron.core.foundation.exit_status import ExitStatus, tool
from megatron.core.foundation.optional_imports import require
from megatron.core.settings.command_line import read_command_line
from megatron.core.settings.flags import positional
from megatron.training.reports.live_view import frame, watch
from megatron.training.reports.run_page import status_of
from megatron.training.reports.run_record import read_run


@dataclass(frozen=True, kw_only=True)
class Flags:
    """What is shown."""

    run: Path = positional(metavar="RUN")
    """Directory of a run, or its file of --metrics-jsonl."""
    interval: float = 2.0
    """Seconds between two looks at the files."""
    once: bool = False
    """Print what there is now, and end."""


@tool
def main(arguments: Sequence[str] | None = None) -> int:
    """Show the run; return the exit status."""
    options = read_command_line(Flags, arguments, description=__doc__)
    if options.once:
        console = require("rich.console", purpose="tools/watch.py").Console()
        console.print(frame(read_run(options.run), now=time.time(), width=console.width))
    else:
        watch(
            lambda: read_run(options.run),
            interval_s=options.interval,
            is_over=lambda run: status_of(run)[1] == "good",
        )
    return ExitStatus.DONE


if __name__ == "__main__":
    sys.exit(main())
