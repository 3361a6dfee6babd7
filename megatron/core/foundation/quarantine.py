"""The list of machines on which a job should not run: written by ranks, read by launchers."""

from __future__ import annotations

import os
from pathlib import Path


def read_quarantine(path: str | Path) -> list[str]:
    """Return the host names of a list, one a line; a # begins a remark. [] if there is no file."""
    try:
        lines = Path(path).read_text(encoding="utf-8").splitlines()
    except FileNotFoundError:
        return []
    names = (line.partition("#")[0].strip() for line in lines)
    return [name for name in names if name]


def add_to_quarantine(path: str | Path, hosts: list[str], reason: str) -> list[str]:
    """Append the hosts that a list does not have yet, and return them.

    Lines are appended in one write, so that several jobs may share the file.
    """
    new = [host for host in dict.fromkeys(hosts) if host not in read_quarantine(path)]
    if new:
        text = "".join(f"{host}  # {reason}\n" for host in new)
        with open(path, "a", encoding="utf-8") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
    return new
