"""The files that describe failures: failure.json, failures.jsonl, and the quarantine of hosts.

The module imports no torch, because the watchdog of a machine and launchers use it, too.
"""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Mapping
from pathlib import Path

FAILURE_FILE = "failure.json"
"""The last failure of the run; the next attempt renames it."""
UNFINISHED = f"{FAILURE_FILE}.tmp-"
"""Prefix of the files of processes that were killed while they wrote."""
FAILURE_HISTORY_FILE = "failures.jsonl"
"""A line for every failure of the run."""
USELESS_TO_REPEAT = ("CONFIG", "DATA", "MISSING_LIBRARY", "SCHEDULE")
"""Classes of failures that the same command would repeat."""
LONGEST_DELAY_S = 600
_IN_HISTORY = (
    "class", "exit_code", "iteration", "attempt", "rank", "host", "where", "last_good_ckpt",
    "action", "message", "time",
)  # fmt: skip
"""Fields of a record in the history, which omits the stacks and positions of all ranks."""


def restart_delay_s(first_s: float, number: int) -> float:
    """Return the pause before restart `number` after a failure: `first_s`, doubled each time."""
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


def read_quarantine(path: str | Path) -> list[str]:
    """Return the host names of a quarantine file, one per line; a # begins a comment.

    Returns [] if the file does not exist.
    """
    try:
        lines = Path(path).read_text(encoding="utf-8").splitlines()
    except FileNotFoundError:
        return []
    names = (line.partition("#")[0].strip() for line in lines)
    return [name for name in names if name]


def add_to_quarantine(path: str | Path, hosts: list[str], reason: str) -> list[str]:
    """Append the hosts that a quarantine file does not list yet, and return them.

    All lines are appended in one write, so that several jobs may share the file.
    """
    new = [host for host in dict.fromkeys(hosts) if host not in read_quarantine(path)]
    if new:
        with open(path, "a", encoding="utf-8") as file:
            file.write("".join(f"{host}  # {reason}\n" for host in new))
            file.flush()
            os.fsync(file.fileno())
    return new
