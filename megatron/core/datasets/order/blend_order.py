"""The order of a blend: the dataset of sample s, and the number of the sample in this dataset.

`GreedyOrder` is Megatron-LM's order, bit for bit. It stores how many samples each dataset has given
before every few hundred samples, and computes the choices between from there. `SpacedOrder` stores
only the weights.

No torch import.
"""

from __future__ import annotations

from abc import ABC, abstractmethod

import numpy as np

from megatron.core.datasets import native

_GOLDEN = 0.6180339887498949
_SPACED_BLOCK = 1024


def greedy_walk(
    weights: np.ndarray,
    counts: np.ndarray,
    start: int,
    steps: int,
    capacities: np.ndarray | None = None,
) -> np.ndarray:
    """Choose the datasets of samples start .. start + steps - 1, int16 [steps].

    Sample s is taken from the dataset with the largest w_d * max(s, 1) - taken_d in double
    precision, the first one on a tie.

    Args:
        weights: [D] float64, summing to 1; fewer than 32,767 datasets.
        counts: [D] float64 (exact up to 2**53), the samples that each dataset has given before;
            updated in place.
        capacities: [D] float64, the samples of each dataset: an exhausted dataset is skipped. None:
            every dataset is large enough.
    """
    picks = np.empty(steps, np.int16)
    if native.compiled is not None:
        native.compiled.walk_blend(weights, capacities, start, steps, counts, picks)
        return picks
    for step in range(steps):
        deficits = weights * float(max(start + step, 1)) - counts
        if capacities is not None:
            deficits[counts >= capacities] = -np.inf
        picks[step] = pick = int(deficits.argmax())
        counts[pick] += 1
    return picks


def stride_of_table(num_datasets: int) -> int:
    """Return the number of samples between two lines of a table; more for many datasets."""
    return max(256, 4 * num_datasets)


def greedy_counts(
    weights: np.ndarray, size: int, every: int, *, capacities: np.ndarray | None = None
) -> np.ndarray:
    """Return how many samples each dataset has given before samples 0, every, 2 * every, ...

    The choices of the next `every` samples follow from one line of this table.

    Returns:
        int64 [ceil(size / every) + 1, D]; the last line holds the counts after `size` samples.
    """
    counts = np.zeros(len(weights))
    limits = None if capacities is None else np.asarray(capacities, np.float64)
    lines = [counts.copy()]
    for start in range(0, size, every):
        greedy_walk(weights, counts, start, min(every, size - start), limits)
        lines.append(counts.copy())
    return np.stack(lines).astype(np.int64)


def _number_within_dataset(picks: np.ndarray, num_datasets: int) -> np.ndarray:
    """Count, for each sample, the earlier samples of the same dataset: int64 like `picks`."""
    by_dataset = np.argsort(picks, kind="stable")
    counts = np.bincount(picks, minlength=num_datasets)
    firsts = np.repeat(np.cumsum(counts) - counts, counts)
    numbers = np.empty(len(picks), np.int64)
    numbers[by_dataset] = np.arange(len(picks)) - firsts
    return numbers


class BlendOrder(ABC):
    """The dataset of each sample, and its number within that dataset; computed block by block.

    Args:
        weights: [D] float64, summing to 1.
        size: samples.
        block: samples that are computed together.
    """

    def __init__(self, weights: np.ndarray, size: int, block: int) -> None:
        self.weights = np.ascontiguousarray(weights, np.float64)
        self.size = size
        self._num_together = block
        self._block: tuple[int, np.ndarray, np.ndarray] | None = None

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, idx: int) -> tuple[int, int]:
        """Return (dataset, number within it) of sample `idx`."""
        if not -self.size <= idx < self.size:
            raise IndexError(f"sample {idx} of a blend of {self.size}")
        number, at = divmod(idx % self.size, self._num_together)
        if self._block is None or self._block[0] != number:
            begin = number * self._num_together
            end = min(begin + self._num_together, self.size)
            self._block = number, *self._between(begin, end)
        _, datasets, numbers = self._block
        return int(datasets[at]), int(numbers[at])

    @abstractmethod
    def _between(self, begin: int, end: int) -> tuple[np.ndarray, np.ndarray]:
        """Return the datasets of a block's samples, and their numbers within them."""


class GreedyOrder(BlendOrder):
    """The greedy rule, from a table of counts.

    Args:
        capacities: see `greedy_walk`.
        table: the result of `greedy_counts` with `stride_of_table`.
    """

    def __init__(
        self,
        weights: np.ndarray,
        size: int,
        *,
        capacities: np.ndarray | None = None,
        table: np.ndarray,
    ) -> None:
        super().__init__(weights, size, stride_of_table(len(weights)))
        self.capacities = None if capacities is None else np.asarray(capacities, np.float64)
        self._table = table

    def _between(self, begin: int, end: int) -> tuple[np.ndarray, np.ndarray]:
        line = begin // self._num_together
        picks = self._picks(line)
        return picks, self._table[line][picks] + _number_within_dataset(picks, len(self.weights))

    def _picks(self, line: int) -> np.ndarray:
        start = line * self._num_together
        counts = np.array(self._table[line], np.float64)
        steps = min(self._num_together, self.size - start)
        return greedy_walk(self.weights, counts, start, steps, self.capacities)

    def totals(self) -> list[int]:
        """Return how many samples each dataset gives in all."""
        totals: list[int] = self._table[-1].tolist()
        return totals

    def arrays(self) -> tuple[np.ndarray, np.ndarray]:
        """Return the whole order: int16 datasets and int64 numbers within them."""
        picks = np.concatenate(
            [np.empty(0, np.int16), *map(self._picks, range(len(self._table) - 1))]
        )
        return picks, _number_within_dataset(picks, len(self.weights))


class SpacedOrder(BlendOrder):
    """Samples of every dataset at even distances, with different phases; it needs no table.

    Sample j of dataset d is due at (j + p_d) / w_d, and samples are ordered by their due times.
    This is the rank-order form of a divisor method of apportionment (Balinski and Young, "Fair
    Representation", 1982): growing the blend never takes a sample back, and no dataset is ever more
    than about one sample ahead of its share. The phases p_d follow the golden ratio, so that
    thousands of small datasets are not all due at once.
    """

    def __init__(self, weights: np.ndarray, size: int) -> None:
        super().__init__(weights, size, _SPACED_BLOCK)
        self._phases = np.modf((np.arange(len(self.weights)) + 0.5) * _GOLDEN)[0]

    def totals(self) -> list[int]:
        first, datasets, _, in_order = self._around(self.size, self.size)
        before = in_order[: self.size - int(first.sum())]
        counts = first + np.bincount(datasets[before], minlength=len(first))
        totals: list[int] = counts.tolist()
        return totals

    def arrays(self) -> tuple[np.ndarray, np.ndarray]:
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

        Before time t, t - D to t + D samples are due. So all samples that are due before `begin`
        minus a little more than D precede `begin`, and all that are due after `end` plus the same
        follow `end`.

        Returns:
            [D] samples of each dataset that precede all candidates; dataset and number of the
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
