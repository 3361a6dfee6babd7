"""What is written about steps that were run again: results that were rejected, and machines on
which a job should not run."""

from __future__ import annotations

import json
import os
import socket
import time
from pathlib import Path

from megatron.training.rerun.verdict import Verdict


def host_name() -> str:
    """Return the name of this machine as its scheduler knows it."""
    return os.environ.get("SLURMD_NODENAME") or socket.gethostname()


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


def write_rejected_result(
    path: str | Path, iteration: int, verdict: Verdict, hosts: list[str]
) -> None:
    """Add a line of JSON about a step that was run again.

    Keys: `iteration`, counted from 1; `diagnostic`, Megatron's name of the cause; `cause`, which
    tells data from model; `replicas`, data-parallel ranks, and `hosts`, if hardware is wrong again;
    `evidence`, a line for each run; `time`, seconds since 1970.
    """
    record = {
        "iteration": iteration,
        "diagnostic": verdict.cause.diagnostic.value,
        "cause": verdict.cause.value,
        "replicas": list(verdict.replicas),
        "hosts": hosts,
        "evidence": list(verdict.evidence),
        "time": time.time(),
    }
    with open(path, "a", encoding="utf-8") as file:
        file.write(json.dumps(record) + "\n")
