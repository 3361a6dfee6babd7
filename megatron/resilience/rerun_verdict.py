"""Infer the cause of a non-finite step from the results of its reruns. Imports no torch."""

from __future__ import annotations

import json
import os
import socket
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path


class RerunDiagnostic(StrEnum):
    """Megatron's names of the results of reruns."""

    CORRECT_RESULT = "correct_result"
    TRANSIENT_ERROR = "transient_error"
    PERSISTENT_ERROR = "persistent_error"


class Cause(StrEnum):
    """The cause of a non-finite step."""

    HARDWARE_ONCE = "hardware, once"
    HARDWARE_PERSISTENT = "hardware, again"
    DATA = "data"
    MODEL = "model"

    @property
    def diagnostic(self) -> RerunDiagnostic:
        """Megatron's name; faults of data and model are both a correct result in Megatron."""
        return {
            Cause.HARDWARE_ONCE: RerunDiagnostic.TRANSIENT_ERROR,
            Cause.HARDWARE_PERSISTENT: RerunDiagnostic.PERSISTENT_ERROR,
        }.get(self, RerunDiagnostic.CORRECT_RESULT)


OWN, EARLIER = "own", "earlier"
"""Samples to compute: each replica's own samples, or the samples of the previous step."""


@dataclass(frozen=True)
class Observation:
    """The result of one run."""

    problems: Mapping[int, str]
    """Replica -> its first loss or gradient that was not finite."""
    bad_weights: Mapping[int, str] = field(default_factory=dict)
    """Replica -> a weight that is not finite."""

    def describe(self) -> str:
        """Return the result in one line."""
        if not self.problems:
            return "finite on all replicas"
        return "; ".join(f"replica {r}: {text}" for r, text in sorted(self.problems.items()))


@dataclass(frozen=True)
class Verdict:
    """The cause of a non-finite step, the evidence, and the replicas."""

    cause: Cause
    evidence: tuple[str, ...]
    replicas: tuple[int, ...] = ()
    """Data-parallel ranks with faulty hardware or faulty samples."""

    def describe(self) -> str:
        """Return the verdict in several lines."""
        where = ""
        if self.replicas:
            where = f" (data-parallel rank {', '.join(map(str, self.replicas))})"
        return "\n  ".join([f"the cause is: {self.cause}{where}", *self.evidence])


Observe = Callable[[int | str], Observation]
"""Run the step again with `OWN` or `EARLIER` samples, or on all replicas with one's samples."""


def find_cause(first: str, observe: Observe, *, num_replicas: int, has_earlier: bool) -> Verdict:
    """Run a step again until the cause is clear, at most three times.

    Args:
        first: the problem of the first run.
        observe: runs the step without an update. It is a collective.
        has_earlier: whether the samples of the previous step, which was finite, are kept.
    """
    evidence = [f"first run: {first}"]

    def run(samples: int | str, what: str) -> Observation:
        found = observe(samples)
        evidence.append(f"{what}: {found.describe()}")
        return found

    again = run(OWN, "the same samples on the same ranks")
    if not again.problems:
        return Verdict(Cause.HARDWARE_ONCE, tuple(evidence))
    for replica, name in sorted(again.bad_weights.items()):
        evidence.append(f"weights of replica {replica}: {name} is not finite")
    suspect = min(again.problems)
    if num_replicas > 1:
        elsewhere = run(suspect, f"the samples of replica {suspect} on all replicas")
        if len(elsewhere.problems) < num_replicas:
            at_fault = tuple(sorted(elsewhere.problems)) or (suspect,)
            return Verdict(Cause.HARDWARE_PERSISTENT, tuple(evidence), at_fault)
    else:
        evidence.append("there is no other replica to compute these samples")
    if len(again.bad_weights) == num_replicas:
        return Verdict(Cause.MODEL, tuple(evidence))
    others = [replica for replica in range(num_replicas) if replica not in again.problems]
    if others:
        control = run(others[0], f"the samples of replica {others[0]} on all replicas")
    elif has_earlier:
        control = run(EARLIER, "the samples of the previous step, which was finite")
    else:
        evidence.append("there are no samples of an earlier finite step")
        return Verdict(Cause.MODEL, tuple(evidence))
    if not control.problems:
        return Verdict(Cause.DATA, tuple(evidence), tuple(sorted(again.problems)))
    if len(control.problems) == num_replicas:
        return Verdict(Cause.MODEL, tuple(evidence))
    return Verdict(Cause.HARDWARE_PERSISTENT, tuple(evidence), tuple(sorted(control.problems)))


def host_name() -> str:
    """Return the name of this machine in its scheduler."""
    return os.environ.get("SLURMD_NODENAME") or socket.gethostname()


def write_rejected_result(
    path: str | Path, iteration: int, verdict: Verdict, hosts: list[str]
) -> None:
    """Append a line of JSON about a step that was run again.

    Keys: `iteration`, counted from 1; `diagnostic`, Megatron's name of the cause; `cause`, which
    also distinguishes data and model; `replicas`, data-parallel ranks, and `hosts`, if hardware
    failed again; `evidence`, a line for each run; `time`, seconds since 1970.
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
