"""The files that say why a run failed; no torch, because a watchdog writes them, too."""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Mapping
from pathlib import Path

FAILURE_FILE = "failure.json"
"""The last failure of the run, while no later attempt has begun."""
UNFINISHED = f"{FAILURE_FILE}.tmp-"
"""How the names of files begin that somebody was killed in the middle of."""
FAILURE_HISTORY_FILE = "failures.jsonl"
"""A line for every failure of the run."""
USELESS_TO_REPEAT = ("CONFIG", "DATA", "MISSING_LIBRARY", "SCHEDULE")
"""Classes of failures that the same command meets again."""
LONGEST_DELAY_S = 600
_IN_HISTORY = (
    "class", "exit_code", "iteration", "attempt", "rank", "host", "where", "last_good_ckpt",
    "action", "message", "time",
)  # fmt: skip
"""What the history keeps of a record: not the stacks and places of all ranks."""


def restart_delay_s(first_s: float, number: int) -> float:
    """Return the pause before start `number` after a failure: twice the one before it, from
    `first_s` on."""
    return min(first_s * 2**number, LONGEST_DELAY_S)


def write_failure(record: Mapping[str, object], directory: str) -> None:
    """Write failure.json, whole or not at all, and add a line to failures.jsonl."""
    Path(directory).mkdir(parents=True, exist_ok=True)
    handle, path = tempfile.mkstemp(dir=directory, prefix=UNFINISHED)
    with os.fdopen(handle, "w", encoding="utf-8") as file:
        json.dump(record, file, indent=1)
    os.replace(path, Path(directory) / FAILURE_FILE)
    line = json.dumps({name: record[name] for name in _IN_HISTORY if name in record})
    with open(Path(directory) / FAILURE_HISTORY_FILE, "a", encoding="utf-8") as history:
        history.write(line + "\n")
