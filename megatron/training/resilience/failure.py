"""One final line for a run that failed, the same facts as JSON, and an exit code by class.

Several ranks usually fail together: one in its own way, the others because it left them. The first
that reaches the rendezvous store reports; the others end quietly.

    FATAL[DATA] iter=0 rank=0 host=node1 where=building data last_good_ckpt=none action=...
"""

from __future__ import annotations

import contextlib
import json
import os
import socket
import sys
import tempfile
import time
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from megatron.core.errors import (
    CheckpointError,
    ConfigError,
    DataError,
    MegatronError,
    MissingExtraError,
    NumericsError,
    ScheduleError,
    TopologyError,
)
from megatron.training.resilience.progress import RunProgress

FAILURE_FILE = "failure.json"

CLASSES: tuple[tuple[type[BaseException], str, int], ...] = (
    (NumericsError, "NONFINITE", 14),
    (DataError, "DATA", 11),
    (CheckpointError, "CHECKPOINT", 12),
    (MissingExtraError, "MISSING_LIBRARY", 15),
    (TopologyError, "TOPOLOGY", 13),
    (ScheduleError, "SCHEDULE", 13),
    (ConfigError, "CONFIG", 10),
    (KeyboardInterrupt, "INTERRUPTED", 130),
    (MemoryError, "OOM", 16),
)
"""Exception -> (class in the message, exit code); anything else is CRASH, 1."""

LOST_PEER = ("PEER_LOST", 17)
OUT_OF_MEMORY = ("OOM", 16)
CRASH = ("CRASH", 1)

_PEER_TEXTS = (
    "Connection closed by peer", "Connection reset by peer", "Broken pipe", "Socket closed",
    "Timed out waiting", "NCCL communicator was aborted", "recvValue failed",
)  # fmt: skip


def classify(error: BaseException) -> tuple[str, int]:
    """Return (class, exit code) of an error; a joint error has the class that its parts share."""
    parts = error.problems if isinstance(error, MegatronError) else ()
    if parts and len({type(part) for part in parts}) == 1:
        error = parts[0]
    for kind, name, code in CLASSES:
        if isinstance(error, kind):
            return name, code
    text = str(error)
    if type(error).__name__ == "OutOfMemoryError" or "can't allocate memory" in text:
        return OUT_OF_MEMORY
    is_communication = isinstance(error, (RuntimeError, OSError))
    if is_communication and any(part in text for part in _PEER_TEXTS):
        return LOST_PEER
    return CRASH


def action_for(error: BaseException, name: str, progress: RunProgress) -> str:
    """Say in a few words what to do."""
    parts = error.problems if isinstance(error, MegatronError) else ()
    if len(parts) == 1:
        error = parts[0]
    if isinstance(error, MegatronError) and error.fix:
        return error.fix.splitlines()[0]
    if isinstance(error, MegatronError):
        return "see the message above"
    resume = (
        f"resume with --load {progress.save_directory}"
        if progress.last_good_checkpoint is not None
        else "start again"
    )
    return {
        "OOM": "use a smaller --micro-batch-size, or --recompute-granularity",
        "PEER_LOST": f"look for the rank that ended first, then {resume}",
        "INTERRUPTED": resume,
    }.get(name, f"see the traceback above, then {resume}")


def fatal_line(error: BaseException, progress: RunProgress) -> str:
    """Return the one line."""
    name, _ = classify(error)
    last = progress.last_good_checkpoint
    return (
        f"FATAL[{name}] iter={progress.iteration} rank={progress.rank}"
        f" host={socket.gethostname()} where={progress.where}"
        f" last_good_ckpt={'none' if last is None else last}"
        f" action={action_for(error, name, progress)}"
    )


def failure_record(error: BaseException, progress: RunProgress) -> dict[str, Any]:
    """Return the content of failure.json."""
    name, code = classify(error)
    found = error.found if isinstance(error, MegatronError) else f"{type(error).__name__}: {error}"
    return {
        "class": name,
        "exit_code": code,
        "iteration": progress.iteration,
        "rank": progress.rank,
        "host": socket.gethostname(),
        "where": progress.where,
        "last_good_ckpt": progress.last_good_checkpoint,
        "action": action_for(error, name, progress),
        "message": found,
        "rule": getattr(error, "rule", ""),
        "flags": list(getattr(error, "flags", ())),
        "time": time.time(),
    }


def write_failure(record: dict[str, Any], directory: str) -> None:
    """Write failure.json, whole or not at all."""
    Path(directory).mkdir(parents=True, exist_ok=True)
    handle, path = tempfile.mkstemp(dir=directory, prefix=FAILURE_FILE)
    with os.fdopen(handle, "w", encoding="utf-8") as file:
        json.dump(record, file, indent=1)
    os.replace(path, Path(directory) / FAILURE_FILE)


def _is_first_to_report(store: Any) -> bool:
    """Ask the store; a rank that cannot reach it any more reports too."""
    if store is None:
        return True
    try:
        return store.add("failure/reports", 1) == 1
    except Exception:
        return True


def report(error: BaseException, progress: RunProgress, store: Any) -> int:
    """Write the message of a failed run once, and return this rank's exit code."""
    _, code = classify(error)
    if not _is_first_to_report(store):
        return code
    if isinstance(error, MegatronError):
        print(f"\n{error}", file=sys.stderr)
    else:
        traceback.print_exception(error, file=sys.stderr)
    if progress.save_directory is not None:
        # The line matters more than the file: a full disk must not hide it.
        with contextlib.suppress(OSError):
            write_failure(failure_record(error, progress), progress.save_directory)
    print(fatal_line(error, progress), file=sys.stderr, flush=True)
    return code


@contextmanager
def failures_reported(progress: RunProgress, store_slot: list[Any]) -> Iterator[None]:
    """Turn an exception of the run into the report and `SystemExit`.

    Args:
        store_slot: holds the rendezvous store once there is one.
    """
    try:
        yield
    except (SystemExit, GeneratorExit):
        raise
    except BaseException as error:
        code = report(error, progress, store_slot[0] if store_slot else None)
        raise SystemExit(code) from None
