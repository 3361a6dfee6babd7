"""The order of a blend: which dataset gives the next sample.

The rule is greedy: sample s comes from the dataset with the largest w_d * max(s, 1) - taken_d in
double precision, the first one on a tie. It looks sequential, since every choice depends on what
was taken before. But it forgets quickly: two walks that disagree about what was taken soon make
the same choices and agree again. So, where the compiled walk is missing, the samples are cut into
blocks, many blocks are walked at once from guessed counts, and a block stands when its counts are
those its predecessor ended with. Blocks that do not are walked again from the right counts. The
result is exact for any weights; the guess decides only how many blocks are walked twice.

No torch import.
"""

from __future__ import annotations

import numpy as np

from megatron.core.datasets import native
from megatron.core.foundation.errors import DataError

_SMALLEST_BLOCK = 256
_LARGEST_BLOCK = 16384
_BLOCKS = 2048
"""Blocks walked at once: enough to hide numpy's cost per call, few enough to stay in cache."""


def greedy_blend(
    weights: np.ndarray, size: int, *, capacities: np.ndarray | None = None
) -> tuple[np.ndarray, np.ndarray]:
    """Build the order of a blend.

    Args:
        weights: [D] float64, summing to 1; fewer than 32,767 datasets.
        size: number of samples.
        capacities: [D], samples each dataset holds: a dataset is left out once it is used up
            (the exhaustive variant). None: datasets are taken to be large enough.
    Returns:
        dataset of each sample, int16 [size], and its number within that dataset, int64 [size].
    """
    weights = np.ascontiguousarray(weights, np.float64)
    if len(weights) >= 32767:
        raise DataError(
            f"a blend of {len(weights):,} datasets.",
            rule="the index of a blend counts datasets in 16 bits: fewer than 32,767",
            fix="merge datasets with tools/merge_datasets.py",
        )
    if size == 0:
        return np.empty(0, np.int16), np.empty(0, np.int64)
    walk = _Walk(weights, None if capacities is None else np.asarray(capacities, np.float64))
    picks = walk.full(size)
    return picks, number_within_dataset(picks, len(weights))


def greedy_counts(
    weights: np.ndarray, size: int, every: int, *, capacities: np.ndarray | None = None
) -> np.ndarray:
    """Return what each dataset has given before samples 0, every, 2 * every, ..., and in all.

    From a row of this table the order of the next `every` samples follows alone, so it stands for
    the whole blend; arguments otherwise as in `greedy_blend`.

    Returns:
        int64 [ceil(size / every) + 1, D]; the last row is the counts after `size` samples.
    """
    weights = np.ascontiguousarray(weights, np.float64)
    walk = _Walk(weights, None if capacities is None else np.asarray(capacities, np.float64))
    return walk.table(size, every).astype(np.int64)


def greedy_block(
    weights: np.ndarray,
    counts: np.ndarray,
    start: int,
    steps: int,
    *,
    capacities: np.ndarray | None = None,
) -> np.ndarray:
    """Return the datasets of samples start .. start + steps - 1, int16.

    Args:
        counts: [D], what each dataset has given before; left alone.
    """
    weights = np.ascontiguousarray(weights, np.float64)
    walk = _Walk(weights, None if capacities is None else np.asarray(capacities, np.float64))
    return walk.block(counts.astype(np.float64), start, steps)


def number_within_dataset(picks: np.ndarray, num_datasets: int) -> np.ndarray:
    """Count, for each sample, the earlier ones of the same dataset: int64 like `picks`."""
    by_dataset = np.argsort(picks, kind="stable")
    counts = np.bincount(picks, minlength=num_datasets)
    firsts = np.repeat(np.cumsum(counts) - counts, counts)
    numbers = np.empty(len(picks), np.int64)
    numbers[by_dataset] = np.arange(len(picks)) - firsts
    return numbers


class _Walk:
    def __init__(self, weights: np.ndarray, capacities: np.ndarray | None) -> None:
        self.weights = weights
        self.capacities = capacities

    def full(self, size: int) -> np.ndarray:
        """Return the datasets of all samples, int16 [size]."""
        if native.compiled is not None:
            return self.block(np.zeros(len(self.weights)), 0, size)
        steps = min(max(size // _BLOCKS, _SMALLEST_BLOCK), _LARGEST_BLOCK)
        starts = np.arange(0, size, steps)
        return self._side_by_side(starts, np.zeros(len(self.weights)), steps)[0][:size]

    def table(self, size: int, every: int) -> np.ndarray:
        """Return the counts before every `every`-th sample and in all, float64 [rows, D]."""
        starts = np.arange(0, size, every)
        rows = np.zeros((len(starts) + 1, len(self.weights)))
        if native.compiled is not None:
            counts = np.zeros(len(self.weights))
            for row, start in enumerate(starts.tolist()):
                rows[row] = counts
                steps = min(every, size - start)
                native.compiled.walk_blend(
                    self.weights, self.capacities, start, steps, counts, None
                )
            rows[-1] = counts
            return rows
        for first in range(0, len(starts), _BLOCKS):
            part = starts[first : first + _BLOCKS]
            _, begins, end = self._side_by_side(part, rows[first], every)
            rows[first : first + len(part)] = begins
            rows[first + len(part)] = end
        if len(starts):
            last = rows[len(starts) - 1].copy()
            self._advance(starts[-1:], last[None, :], size - int(starts[-1]))
            rows[-1] = last
        return rows

    def block(self, counts: np.ndarray, start: int, steps: int) -> np.ndarray:
        """Return the datasets of one run of samples, int16 [steps]; `counts` is updated."""
        if native.compiled is None:
            return self._advance(np.array([start]), counts[None, :], steps)[:, 0]
        picks = np.empty(steps, np.int16)
        native.compiled.walk_blend(self.weights, self.capacities, start, steps, counts, picks)
        return picks

    def _side_by_side(
        self, starts: np.ndarray, first_counts: np.ndarray, steps: int
    ) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Walk consecutive blocks of `steps` samples.

        Args:
            starts: [K] first sample of each.
            first_counts: [D], counts before the first block.
        Returns:
            picks, int16 [K * steps]; counts before each block, [K, D], and after the last, [D].
        """
        begins = np.zeros((len(starts), len(self.weights)))
        begins[0] = first_counts
        # A quarter of a block walked before each start lets most guesses come right.
        warm_up = steps // 4
        begins[1:] = self._likely_counts(starts[1:] - warm_up)
        self._advance(starts[1:] - warm_up, begins[1:], warm_up)
        ends = begins.copy()
        picks = self._advance(starts, ends, steps)
        while len(wrong := 1 + np.flatnonzero((ends[:-1] != begins[1:]).any(axis=1))):
            # At least the first of these now starts right, so this ends.
            begins[wrong] = ends[wrong - 1]
            counts = begins[wrong]
            picks[:, wrong] = self._advance(starts[wrong], counts, steps)
            ends[wrong] = counts
        return np.ascontiguousarray(picks.T).reshape(-1), begins, ends[-1]

    def _likely_counts(self, taken: np.ndarray) -> np.ndarray:
        """Guess what each dataset has given after `taken` [K] samples: [K, D], rows sum to it.

        The share rounded down, and one more for the largest remainders.
        """
        shares = taken[:, None] * self.weights
        counts = np.floor(shares)
        by_remainder = np.argsort(counts - shares, axis=1, kind="stable")
        remainder_rank = np.empty_like(by_remainder)
        np.put_along_axis(
            remainder_rank, by_remainder, np.arange(len(self.weights))[None, :], axis=1
        )
        return counts + (remainder_rank < (taken - counts.sum(axis=1))[:, None])

    def _advance(self, starts: np.ndarray, counts: np.ndarray, steps: int) -> np.ndarray:
        """Walk K blocks side by side.

        Args:
            starts: [K] first sample of each.
            counts: [K, D] float64 (exact up to 2**53), updated in place.
        Returns:
            int16 [steps, K].
        """
        num_blocks, num_datasets = counts.shape
        picks = np.empty((steps, num_blocks), np.int16)
        deficits = np.empty_like(counts)
        pick = np.empty(num_blocks, np.intp)
        blocks = np.arange(num_blocks)
        for step in range(steps):
            sample = np.maximum(starts + step, 1).astype(np.float64)
            np.multiply(sample[:, None], self.weights, out=deficits)
            np.subtract(deficits, counts, out=deficits)
            if self.capacities is not None:
                deficits[counts >= self.capacities] = -np.inf
            deficits.argmax(axis=1, out=pick)
            picks[step] = pick
            counts[blocks, pick] += 1
        return picks
