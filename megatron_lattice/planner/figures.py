"""Accuracy of predictions: errors, macro-median, order of layouts, regret of the choice."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
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

    def line(self, title: str) -> str:
        """Return a row of the table that `TITLES` heads."""
        errors = (self.median, self.mean, self.macro_median, self.within_tenth)
        shares = (*errors, self.pairs, self.regret, self.worst_regret)
        return f"{title:<28}{self.num_rows:>6}" + "".join(f"{100 * x:>9.1f}%" for x in shares)


TITLES = f"{'':<28}{'rows':>6}" + "".join(
    f"{title:>10}" for title in ("median", "mean", "macro", "in 10 %", "pairs", "regret", "worst")
)


def figures(
    predicted: FloatArray, measured: FloatArray, families: Sequence[str], groups: Sequence[str]
) -> Figures:
    """Compare predictions with measurements.

    Args:
        families: family of each row; the macro-median is the mean of their medians.
        groups: rows with the same name differ by layout only; an empty name joins no group.
    """
    error = np.abs(predicted / measured - 1)
    of_family: dict[str, list[float]] = defaultdict(list)
    for family, value in zip(families, error, strict=True):
        of_family[family].append(float(value))
    order, regrets = _ranking(predicted, measured, groups)
    return Figures(
        num_rows=len(error),
        median=float(np.median(error)),
        mean=float(np.mean(error)),
        macro_median=float(np.mean([np.median(values) for values in of_family.values()])),
        within_tenth=float(np.mean(error <= 0.1)),
        pairs=float(np.mean(order)) if order else 1.0,
        regret=float(np.mean(regrets)) if regrets else 0.0,
        worst_regret=max(regrets, default=0.0),
    )


def rows_that_compete(groups: Sequence[str]) -> list[list[int]]:
    """Return the rows of each group that has several; rows without a group compete with none."""
    members: dict[str, list[int]] = defaultdict(list)
    for index, group in enumerate(groups):
        if group:
            members[group].append(index)
    return [rows for rows in members.values() if len(rows) > 1]


def _ranking(
    predicted: FloatArray, measured: FloatArray, groups: Sequence[str]
) -> tuple[list[float], list[float]]:
    order: list[float] = []
    regrets: list[float] = []
    for rows in rows_that_compete(groups):
        for position, i in enumerate(rows):
            for j in rows[position + 1 :]:
                ratio = measured[i] / measured[j]
                if max(ratio, 1 / ratio) < 1 + DISTINGUISHABLE:
                    continue
                is_tie = predicted[i] == predicted[j]
                is_right = (predicted[i] < predicted[j]) == (measured[i] < measured[j])
                order.append(0.5 if is_tie else float(is_right))
        chosen = min(rows, key=lambda row: predicted[row])
        regrets.append(float(measured[chosen] / min(measured[row] for row in rows) - 1))
    return order, regrets
