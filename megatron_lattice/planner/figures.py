"""Accuracy of predictions: errors, macro-median, order of layouts, regret of the choice."""

from __future__ import annotations

import itertools
import math
from collections import defaultdict
from collections.abc import Hashable, Sequence
from dataclasses import dataclass

import numpy as np

from megatron_lattice.planner.workload import FloatArray

DISTINGUISHABLE = 0.03
"""Measured times that differ by less have no order."""


@dataclass(frozen=True, kw_only=True)
class Figures:
    """Errors are shares, 0.05 for 5 %."""

    num_rows: int
    median: float
    mean: float
    macro_median: float
    within_tenth: float
    pairs: float
    """Share of pairs of layouts in the right order; a tie counts half."""
    regret: float
    """Mean over groups: measured time of the layout predicted fastest, over the fastest, - 1."""
    worst_regret: float
    in_interval: float
    """Share of the rows in their interval."""

    def line(self, title: str) -> str:
        """Return a row of the table that `TITLES` heads."""
        errors = (self.median, self.mean, self.macro_median, self.within_tenth)
        shares = (*errors, self.pairs, self.regret, self.worst_regret, self.in_interval)
        return f"{title:<38}{self.num_rows:>6}" + "".join(f"{100 * x:>9.1f}%" for x in shares)


_COLUMNS = ("median", "mean", "macro", "in 10 %", "pairs", "regret", "worst", "interval")
TITLES = f"{'':<38}{'rows':>6}" + "".join(f"{title:>10}" for title in _COLUMNS)


def figures(
    predicted: FloatArray,
    measured: FloatArray,
    families: Sequence[str],
    groups: Sequence[str],
    layouts: Sequence[str] = (),
    within: FloatArray | None = None,
) -> Figures:
    """Compare predictions with measurements.

    Args:
        families: family of each row; the macro-median is the mean of their medians.
        groups: rows with the same name differ by layout only; an empty name joins no group.
        layouts: rows of a group with the same name count once, with their mean times.
        within: factor of the interval of each row, in either direction.
    """
    error = np.abs(predicted / measured - 1)
    of_family: dict[str, list[float]] = defaultdict(list)
    for family, value in zip(families, error, strict=True):
        of_family[family].append(float(value))
    order, regrets = _ranking(predicted, measured, groups, layouts or range(len(error)))
    off = np.maximum(predicted / measured, measured / predicted)
    return Figures(
        num_rows=len(error),
        median=float(np.median(error)),
        mean=float(np.mean(error)),
        macro_median=float(np.mean([np.median(values) for values in of_family.values()])),
        within_tenth=float(np.mean(error <= 0.1)),
        pairs=float(np.mean(order)) if order else 1.0,
        regret=float(np.mean(regrets)) if regrets else 0.0,
        worst_regret=max(regrets, default=0.0),
        in_interval=float(np.mean(off <= within)) if within is not None else math.nan,
    )


def rows_that_compete(groups: Sequence[str]) -> list[list[int]]:
    """Return the rows of each group that has several; rows without a group compete with none."""
    members: dict[str, list[int]] = defaultdict(list)
    for index, group in enumerate(groups):
        if group:
            members[group].append(index)
    return [rows for rows in members.values() if len(rows) > 1]


def _ranking(
    predicted: FloatArray,
    measured: FloatArray,
    groups: Sequence[str],
    layouts: Sequence[Hashable],
) -> tuple[list[float], list[float]]:
    order: list[float] = []
    regrets: list[float] = []
    for rows in rows_that_compete(groups):
        same: dict[Hashable, list[int]] = defaultdict(list)
        for row in rows:
            same[layouts[row]].append(row)
        if len(same) == 1:
            continue
        found = [(predicted[each].mean(), measured[each].mean()) for each in same.values()]
        for (one, one_s), (other, other_s) in itertools.combinations(found, 2):
            if max(one_s / other_s, other_s / one_s) < 1 + DISTINGUISHABLE:
                continue
            is_right = (one < other) == (one_s < other_s)
            order.append(0.5 if one == other else float(is_right))
        regrets.append(float(min(found)[1] / min(seconds for _, seconds in found) - 1))
    return order, regrets
