"""Put the clocks of ranks on one, by what collectives say of the order of events.

No rank leaves an all-reduce before all have entered it, and no message arrives before it was sent.
With offsets o added to the clock of each rank, an event of rank y that precedes one of rank x says

    time_x + o_x >= time_y + o_y,    that is    o_y - o_x <= time_x - time_y,

a system of difference constraints ("Introduction to Algorithms", Cormen et al., section 24.4). The
shortest paths from and to the first rank are the largest and the smallest offset that a rank can
have; the middle of the two satisfies all constraints together, and half of what is between them is
how far it can be wrong.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

SYNCHRONISING = (
    "all_reduce", "reduce_scatter", "all_gather", "all_to_all", "barrier", "all_gather_object",
)  # fmt: skip
"""Operations that no rank completes before all have entered."""


@dataclass(frozen=True)
class CollectiveTimes:
    """One operation between ranks, as one of them saw it; times in ns on the clock of that rank."""

    operation: str
    group: str
    ranks: tuple[int, ...]
    tag: int
    number: int
    num_elements: int
    start_ns: int
    end_ns: int

    @property
    def key(self) -> tuple[str, tuple[int, ...], int, int]:
        """What the same operation has on all ranks."""
        return self.group, self.ranks, self.tag, self.number


OfRanks = Mapping[int, CollectiveTimes]
"""One operation as each rank that took part in it saw it."""


def matched(of_rank: Mapping[int, Sequence[CollectiveTimes]]) -> list[OfRanks]:
    """Return the operations that at least two of the ranks saw, in the order of the first start."""
    found: dict[tuple[str, tuple[int, ...], int, int], dict[int, CollectiveTimes]] = {}
    for rank, operations in of_rank.items():
        for each in operations:
            found.setdefault(each.key, {})[rank] = each
    several = (each for each in found.values() if len(each) > 1)
    return sorted(several, key=lambda each: min(times.start_ns for times in each.values()))


def is_synchronising(operation: OfRanks) -> bool:
    """Return whether all ranks entered an operation before any left it."""
    return all(each.operation in SYNCHRONISING for each in operation.values())


@dataclass(frozen=True)
class ClockOffset:
    """What to add to the clock of a rank, and how far that can be wrong."""

    offset_ns: float
    uncertainty_ns: float
    """Infinite if nothing ties the rank to the first one; negative if the clocks of the traces do
    not run equally fast."""


def clock_offsets(operations: Sequence[OfRanks], ranks: Sequence[int]) -> dict[int, ClockOffset]:
    """Return the offset of each rank against the first of `ranks`.

    Args:
        operations: those that several ranks saw.
    """
    bounds = _bounds(operations)
    most = _shortest_paths(bounds, ranks, ranks[0])
    least = _shortest_paths({(y, x): d for (x, y), d in bounds.items()}, ranks, ranks[0])
    found = {}
    for rank in ranks:
        if math.isinf(most[rank]) or math.isinf(least[rank]):
            # Known from one side at best: the clock stays as it is.
            found[rank] = ClockOffset(0.0, math.inf)
        else:
            found[rank] = ClockOffset(
                (most[rank] - least[rank]) / 2, (most[rank] + least[rank]) / 2
            )
    return found


def _bounds(operations: Sequence[OfRanks]) -> dict[tuple[int, int], float]:
    """Return (x, y) -> the least upper bound of o_y - o_x that an operation gives."""
    bounds: dict[tuple[int, int], float] = defaultdict(lambda: math.inf)
    for operation in operations:
        kinds = {each.operation for each in operation.values()}
        for x, ended in operation.items():
            for y, begun in operation.items():
                precedes = is_synchronising(operation) or (
                    kinds == {"send", "recv"}
                    and (ended.operation, begun.operation) == ("recv", "send")
                )
                if x != y and precedes:
                    bounds[x, y] = min(bounds[x, y], ended.end_ns - begun.start_ns)
    return bounds


def _shortest_paths(
    lengths: Mapping[tuple[int, int], float], ranks: Sequence[int], first: int
) -> dict[int, float]:
    """Return the length of the shortest path from `first` to each rank (Bellman and Ford)."""
    found = dict.fromkeys(ranks, math.inf)
    found[first] = 0.0
    for _ in range(len(ranks) - 1):
        for (x, y), length in lengths.items():
            found[y] = min(found[y], found[x] + length)
    return found
