"""Exit codes of tools, for scripts that call them.

    0    done
    1    it failed, or its check found a problem
    2    its arguments or settings cannot be used: nothing was done
    130  Ctrl-C
    141  the reader of its output ended first, as in `tool | head -1`

A training run, and tools that load a model as a run does, end with a code for each class of failure
instead: `megatron/resilience/failure.py`.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Sequence
from enum import IntEnum

from megatron.core.foundation import standard_output
from megatron.core.foundation.errors import ConfigError, MegatronError, ScheduleError, TopologyError


class ExitStatus(IntEnum):
    """Exit codes of tools; argparse ends with 2 as well."""

    DONE = 0
    FAILED = 1
    WRONG_USAGE = 2
    INTERRUPTED = 130
    OUTPUT_CLOSED = 141
    """Exit code that a shell reports for a process that SIGPIPE ended."""


_OF_SETTINGS = (ConfigError, TopologyError, ScheduleError)


def status_of(error: MegatronError) -> ExitStatus:
    """Return the exit code for an error; a joint error has the class that its parts share."""
    parts = error.problems
    if parts and len({type(part) for part in parts}) == 1:
        error = parts[0]
    return ExitStatus.WRONG_USAGE if isinstance(error, _OF_SETTINGS) else ExitStatus.FAILED


def tool(main: Callable[[Sequence[str] | None], int]) -> Callable[..., int]:
    """Wrap the `main` of a tool: errors end it with a message and a status, not a traceback."""

    @functools.wraps(main)
    def reported(argv: Sequence[str] | None = None) -> int:
        try:
            status = int(main(argv))
            sys.stdout.flush()
        except MegatronError as error:
            print(error, file=sys.stderr)
            return int(status_of(error))
        except KeyboardInterrupt:
            print("interrupted", file=sys.stderr)
            return int(ExitStatus.INTERRUPTED)
        except BrokenPipeError as error:
            if standard_output.cause_of(error) is error:
                raise
            return int(ExitStatus.OUTPUT_CLOSED)
        return status

    return reported
