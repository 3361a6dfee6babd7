"""The order of a blend as something to ask, not a pair of arrays.

`GreedyOrder` is Megatron-LM's order, bit for bit: it keeps what each dataset had given before
every few hundred samples and walks from there. `SpacedOrder` keeps nothing but the weights.

No torch import.
"""

from __future__ import annotations

from typing import Protocol

import numpy as np

from megatron.core.datasets.blends.sampling import greedy_block, number_within_dataset

_GOLDEN = 0.6180339887498949
_SPACED_BLOCK = 1024


class BlendOrder(Protocol):
    """Which dataset gives sample s, and which of its samples that is."""

    def __len__(self) -> int: ...

    def __getitem__(self, idx: int) -> tuple[int, int]:
        """Return (dataset, number within it)."""

    def totals(self) -> list[int]:
        """Return how many samples each dataset gives in all."""

    def arrays(self) -> tuple[np.ndarray, np.ndarray]:
        """Return the whole order: int16 datasets and int64 numbers within them."""


def stride_of_table(num_datasets: int) -> int:
    """Return the samples between two rows: a row of many datasets must pay for itself."""
    return max(256, 4 * num_datasets)


class GreedyOrder:
    """The greedy rule of `blends.sampling`, from a table of counts.

    Args:
        weights: [D] float64, summing to 1.
        size: samples.
        capacities: see `greedy_blend`.
        table: of `greedy_counts` with `stride_of_table`.
    """

    def __init__(
        self,
        weights: np.ndarray,
        size: int,
        *,
        capacities: np.ndarray | None = None,
        table: np.ndarray,
    ) -> None:
        self.weights = weights
        self.size = size
        self.capacities = capacities
        self._stride = stride_of_table(len(weights))
        self._table = table
        self._block: tuple[int, np.ndarray, np.ndarray] | None = None

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, idx: int) -> tuple[int, int]:
        """Return (dataset, number within it) of sample `idx`."""
        idx = _checked(idx, self.size)
        row, at = divmod(idx, self._stride)
        if self._block is None or self._block[0] != row:
            start = row * self._stride
            steps = min(self._stride, self.size - start)
            counts = np.asarray(self._table[row])
            picks = greedy_block(self.weights, counts, start, steps, capacities=self.capacities)
            numbers = counts[picks] + number_within_dataset(picks, len(self.weights))
            self._block = row, picks, numbers
        _, picks, numbers = self._block
        return int(picks[at]), int(numbers[at])

    def totals(self) -> list[int]:
        """Return how many samples each dataset gives in all."""
        totals: list[int] = self._table[-1].tolist()
        return totals

    def arrays(self) -> tuple[np.ndarray, np.ndarray]:
        """Return the whole order: int16 datasets and int64 numbers within them."""
        picks = [
            greedy_block(
                self.weights,
                np.asarray(self._table[row]),
                row * self._stride,
                min(self._stride, self.size - row * self._stride),
                capacities=self.capacities,
            )
            for row in range(len(self._table) - 1)
        ]
        full = np.concatenate(picks) if picks else np.empty(0, np.int16)
        return full, number_within_dataset(full, len(self.weights))


class SpacedOrder:
    """Every dataset at even distances, the phases spread out; no table at all.

    Sample j of dataset d is due at (j + p_d) / w_d, and samples come in the order in which they
    are due. This is the rank-order form of a divisor method of apportionment (Balinski and Young,
    "Fair Representation", 1982): growing the blend never takes a sample back, and no dataset is
    ever more than about one sample ahead of its share. The phases p_d follow the golden ratio, so
    that thousands of small datasets do not all come due at once.

    Args:
        weights: [D] float64, summing to 1.
        size: samples.
    """

    def __init__(self, weights: np.ndarray, size: int) -> None:
        self.weights = np.asarray(weights, np.float64)
        self.size = size
        self._phases = np.modf((np.arange(len(self.weights)) + 0.5) * _GOLDEN)[0]
        self._block: tuple[int, np.ndarray, np.ndarray] | None = None

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, idx: int) -> tuple[int, int]:
        """Return (dataset, number within it) of sample `idx`."""
        idx = _checked(idx, self.size)
        row, at = divmod(idx, _SPACED_BLOCK)
        if self._block is None or self._block[0] != row:
            start = row * _SPACED_BLOCK
            self._block = row, *self._between(start, min(start + _SPACED_BLOCK, self.size))
        _, datasets, numbers = self._block
        return int(datasets[at]), int(numbers[at])

    def totals(self) -> list[int]:
        """Return how many samples each dataset gives in all."""
        first, datasets, _, in_order = self._around(self.size, self.size)
        before = in_order[: self.size - int(first.sum())]
        counts = first + np.bincount(datasets[before], minlength=len(first))
        totals: list[int] = counts.tolist()
        return totals

    def arrays(self) -> tuple[np.ndarray, np.ndarray]:
        """Return the whole order: int16 datasets and int64 numbers within them."""
        datasets, numbers = self._between(0, self.size)
        return datasets.astype(np.int16), numbers

    def _between(self, begin: int, end: int) -> tuple[np.ndarray, np.ndarray]:
        first, datasets, numbers, in_order = self._around(begin, end)
        skipped = begin - int(first.sum())
        chosen = in_order[skipped : skipped + end - begin]
        return datasets[chosen], numbers[chosen]

    def _around(
        self, begin: int, end: int
    ) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
        """Return candidates for samples begin..end-1.

        Before time t, t - D to t + D samples are due, so all samples due before `begin` minus a
        little more than D come before it, and none due after `end` plus that comes before `end`.

        Returns:
            [D] samples of each dataset that come before all candidates; dataset and number of the
            candidates; their places in order of due time.
        """
        slack = len(self.weights) + 2
        first = np.floor(self.weights * max(begin - slack, 0) - self._phases)
        first = np.maximum(first, 0).astype(np.int64)
        last = np.ceil(self.weights * (end + slack) + 1).astype(np.int64)
        counts = last - first
        datasets = np.repeat(np.arange(len(counts)), counts)
        ends = np.cumsum(counts)
        numbers = np.arange(ends[-1]) - np.repeat(ends - counts - first, counts)
        due = (numbers + self._phases[datasets]) / self.weights[datasets]
        return first, datasets, numbers, np.lexsort((datasets, due))


def _checked(idx: int, size: int) -> int:
    if not -size <= idx < size:
        raise IndexError(f"sample {idx} of a blend of {size}")
    return idx % size
