"""Which ranks are persistently slower than their peers, and at what.

Each rank is compared with ranks that should take as long as it does, step by step, so that what
slows all of them down cancels. It is compared with the median of the others, not of all: of two
ranks, each is half of the median of all. Of the steps of a window the interquartile mean counts,
which a quarter of the steps cannot move, whatever happens in them. A rank is named at the third
check in a row that finds it: one that other work has slowed for a moment is not.

Shapes: t steps, r ranks of the run, n ranks or groups that are compared.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float64]
Peers = Sequence[Sequence[int]]
"""Ranks that are compared with each other."""

WINDOW = 10
"""Steps that are looked at."""
FEWEST_STEPS = 8
"""Steps in the window before anything is said."""
CHECKS_IN_A_ROW = 3
"""That have to find a rank before it is named. With a check every five steps this takes a rank that
is slow in about sixteen of them, and names one that stays so within twenty."""
TRIMMED_SHARE = 0.25
"""Of the steps of the window, the fastest and the slowest, which do not count."""
SLOW_RATIO = 1.15
"""Of the time that a rank computes to that of its peers. The times of equal ranks differ by a few
percent."""
STALLED_SHARE = 0.4
"""Of the compute of its peers, by which a rank stands still longer than they do."""
CROWDED_SHARE = 0.1
"""Of their compute, for which peers may wait for processors. Where they wait longer, there are too
few for all, and who waits longest is chance."""
LATE_SHARE = 0.1
"""Of a step, by which a rank waits longer for its loader, or a group for bytes, than its peers."""


@dataclass(frozen=True, kw_only=True)
class RankTimes:
    """Seconds of all ranks in some steps."""

    step_s: Array
    """[t, r], as all below."""
    work_s: Array
    """Computing: processor time on a CPU, which other processes there do not lengthen."""
    stalled_s: Array
    """Neither computing nor waiting for anybody: stopped, or blocked in a call."""
    queued_s: Array
    """Waiting for a processor."""
    data_s: Array
    """Waiting for the loader."""
    group_s: Mapping[str, Array] = field(default_factory=dict)
    """Waiting in collectives of this rank's group of a kind."""

    def then(self, later: RankTimes) -> RankTimes:
        """Return the last WINDOW steps of these and later ones."""

        def joined(one: Array, other: Array) -> Array:
            return np.concatenate([one, other])[-WINDOW:]

        return RankTimes(
            step_s=joined(self.step_s, later.step_s),
            work_s=joined(self.work_s, later.work_s),
            stalled_s=joined(self.stalled_s, later.stalled_s),
            queued_s=joined(self.queued_s, later.queued_s),
            data_s=joined(self.data_s, later.data_s),
            group_s={k: joined(v, later.group_s[k]) for k, v in self.group_s.items()},
        )


@dataclass(frozen=True)
class Finding:
    """Ranks that are slow at something."""

    kind: str
    """compute, standstill, processor, loader, or the name of a kind of group: its link."""
    ranks: tuple[int, ...]
    """One, or all of a group."""
    excess: float = field(compare=False)
    """Of compute the ratio to the peers; else seconds of a step more than those of the peers."""
    peers: tuple[int, ...] = field(compare=False, default=())

    def __str__(self) -> str:
        ranks = ", ".join(map(str, self.ranks))
        if self.kind == "compute":
            return f"rank {ranks} is slow: it computes {self.excess:.2f} times as long as its peers"
        more_ms = f"{self.excess * 1000.0:.1f} ms of a step longer"
        if self.kind == "standstill":
            return f"rank {ranks} is stopped or blocked {more_ms} than its peers"
        if self.kind == "processor":
            return f"rank {ranks} waits for a processor {more_ms} than its peers"
        if self.kind == "loader":
            return f"rank {ranks} has a slow loader: it waits {more_ms} than its peers"
        return (
            f"ranks {ranks} have a slow link: {self.kind} transfers take {more_ms} than elsewhere"
        )


class StragglerWatch:
    """Judges times as they come.

    Args:
        stages: ranks of the same stage of the pipeline.
        replicas: ranks that differ in nothing but their replica, and read as much data.
        links: kind -> groups of that kind in one stage, for each stage.
    """

    def __init__(
        self, stages: Peers, replicas: Peers, links: Mapping[str, Sequence[Peers]]
    ) -> None:
        self.stages, self.replicas, self.links = stages, replicas, links
        self.named: list[Finding] = []
        """What is slow now."""
        self._times: RankTimes | None = None
        self._times_found: dict[Finding, int] = {}
        """In so many checks in a row."""

    def add(self, times: RankTimes) -> tuple[list[Finding], list[Finding]]:
        """Take the times of more steps; return what is slow from now on, and what no longer is."""
        self._times = times if self._times is None else self._times.then(times)
        found = self._find(self._times) if len(self._times.step_s) >= FEWEST_STEPS else []
        self._times_found = {f: self._times_found.get(f, 0) + 1 for f in found}
        persistent = [f for f in found if self._times_found[f] >= CHECKS_IN_A_ROW]
        begins = [f for f in persistent if f not in self.named]
        ends = [f for f in self.named if f not in found]
        self.named = persistent
        return begins, ends

    def forget(self) -> None:
        """Begin anew, after steps that were not measured."""
        self._times, self._times_found, self.named = None, {}, []

    def _find(self, times: RankTimes) -> list[Finding]:
        step_s = float(np.median(times.step_s))
        found: list[Finding] = []
        for peers in _comparable(self.stages):
            work = times.work_s[:, peers]
            others = median_of_others(work)
            ratio = _persistent(work / np.maximum(others, 1e-9))
            slow = ratio >= SLOW_RATIO
            found += _findings("compute", peers, slow, ratio)
            stalled = times.stalled_s[:, peers]
            longer = _persistent(stalled - median_of_others(stalled))
            usual = float(np.median(others))
            found += _findings("standstill", peers, longer >= STALLED_SHARE * usual, longer)
            queued = times.queued_s[:, peers]
            others = median_of_others(queued)
            longer = _persistent(queued - others)
            is_idle = _persistent(others) <= CROWDED_SHARE * usual
            crowded = is_idle & (longer >= STALLED_SHARE * usual)
            found += _findings("processor", peers, crowded, longer)
        for peers in _comparable(self.replicas):
            waits = times.data_s[:, peers]
            longer = _persistent(waits - median_of_others(waits))
            found += _findings("loader", peers, longer >= LATE_SHARE * step_s, longer)
        for kind, groups_of_stages in self.links.items():
            for groups in _comparable(groups_of_stages):
                # Who comes last to a collective waits for the bytes alone.
                transfer = np.stack(
                    [times.group_s[kind][:, list(ranks)].min(axis=1) for ranks in groups], axis=1
                )
                longer = _persistent(transfer - median_of_others(transfer))
                found += [
                    Finding(kind, tuple(groups[i]), float(longer[i]))
                    for i in np.flatnonzero(longer >= LATE_SHARE * step_s)
                ]
        return found


def median_of_others(x: Array) -> Array:
    """Return for each column the median of the other columns, row by row: [t, n] -> [t, n]."""
    num = x.shape[1]
    ordered = np.sort(x, axis=1)
    position = np.argsort(np.argsort(x, axis=1), axis=1)

    def smallest(i: int) -> Array:
        """The i-th smallest of the others."""
        return np.where(position > i, ordered[:, [i]], ordered[:, [i + 1]])

    return (smallest((num - 2) // 2) + smallest((num - 1) // 2)) / 2


def slowest_and_fastest(
    work_s: Sequence[float], stages: Peers, count: int
) -> tuple[list[tuple[int, float]], list[tuple[int, float]]]:
    """Return the `count` slowest and fastest ranks, each with its ratio to the median of its stage.

    Args:
        work_s: mean compute of a step, by rank.
    """
    ratios: dict[int, float] = {}
    for peers in stages:
        median = float(np.median([work_s[rank] for rank in peers])) or 1.0
        ratios |= {rank: work_s[rank] / median for rank in peers}
    ordered = sorted(ratios.items(), key=lambda item: item[1])
    return ordered[::-1][:count], ordered[:count]


def _comparable(peers: Sequence[Sequence]) -> list[list]:
    return [list(each) for each in peers if len(each) > 1]


def _persistent(x: Array) -> Array:
    """[t, n] -> [n]: the mean of the middle half of the steps."""
    cut = int(TRIMMED_SHARE * len(x))
    return np.sort(x, axis=0)[cut : len(x) - cut].mean(axis=0)


def _findings(kind: str, peers: Sequence[int], slow: NDArray[np.bool_], by: Array) -> list[Finding]:
    return [
        Finding(kind, (peers[i],), float(by[i]), tuple(p for p in peers if p != peers[i]))
        for i in map(int, np.flatnonzero(slow))
    ]
