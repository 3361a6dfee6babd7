"""Pack samples of uneven length into sequences, and choose how many ranks split each sequence.

`pack` fills sequences of one capacity. `balance` also chooses, for each packed sequence of a global
batch, how many neighbouring ranks split it (dynamic context parallelism). A long sample is split
over many ranks, because its activations do not fit on one or because it is more than one rank's
share of the work. Short samples are not split, so they need no communication. This is arithmetic on
lengths: every rank computes the same result without a message.

Ranks form a tree: all of them, halves of them, halves of these. Large groups compute first, so that
all ranks of a group have computed the same sequences before and none waits for another. Work is
assigned as in R. Graham, "Bounds on Multiprocessing Timing Anomalies", SIAM J. Appl. Math. 17
(1969): the largest piece first, to the least loaded rank.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from megatron.core.foundation.errors import DataError
from megatron.core.topology.rank_grid import nested_sizes

WorkOf = Callable[[int], float]
"""The work of a sample by its tokens, in any unit."""

_EVEN = 1.02
"""Largest work of a rank over the mean that is not improved by splitting more samples."""


def pack(lengths: Sequence[int], capacity: int) -> list[list[int]]:
    """Put items into bins, each into the fullest that still takes it, longest first.

    Returns:
        the numbers of the items in each bin, ascending; bins in the order of their first item.
    """
    bins: list[list[int]] = []
    free: list[tuple[int, int]] = []  # (tokens left, bin), sorted
    for item in sorted(range(len(lengths)), key=lambda i: (-lengths[i], i)):
        at = bisect_left(free, (lengths[item], -1))
        if at == len(free):
            left, number = capacity, len(bins)
            bins.append([])
        else:
            left, number = free.pop(at)
        bins[number].append(item)
        insort(free, (left - lengths[item], number))
    return sorted((sorted(one) for one in bins), key=lambda one: one[0])


@dataclass(frozen=True)
class PackedSequence:
    """Samples that are one micro batch of some neighbouring ranks.

    Attributes:
        samples: their numbers in the global batch; empty for a rank that has no work left.
        first_rank, num_ranks: the ranks that split the sequence.
    """

    samples: tuple[int, ...]
    first_rank: int
    num_ranks: int


@dataclass(frozen=True)
class BalancedBatch:
    """A global batch as packed sequences.

    Attributes:
        microbatches: for each micro batch the sequence of each rank.
        work: work of each rank, in the unit of `WorkOf`.
    """

    microbatches: tuple[tuple[PackedSequence, ...], ...]
    work: tuple[float, ...]

    @property
    def imbalance(self) -> float:
        """The largest work of a rank over the mean."""
        return max(self.work) * len(self.work) / (sum(self.work) or 1.0)


def balance(
    lengths: Sequence[int],
    num_ranks: int,
    max_tokens: int,
    work_of: WorkOf,
    multiple: int = 1,
) -> BalancedBatch:
    """Distribute the samples of a global batch over ranks.

    Args:
        lengths: tokens of each sample.
        num_ranks: number of ranks that may share samples.
        max_tokens: tokens of a sequence that one rank can hold.
        work_of: returns the work of a sample with so many tokens.
        multiple: the number of micro batches is a multiple of it; the last ones may be empty.
    Returns:
        sequences that hold each sample once. Every rank has the same number of micro batches.
    Raises:
        DataError: a sample does not fit on all ranks together. They all raise.
    """
    longest = max(lengths, default=0)
    if longest > num_ranks * max_tokens:
        raise DataError(
            f"a sample of {longest} tokens for {num_ranks} ranks.",
            rule=f"a rank holds {max_tokens} tokens of a sequence, and all ranks split the longest",
            flags=["--max-seqlen-per-dp-cp-rank"],
            fix=f"use --max-seqlen-per-dp-cp-rank {-(-longest // num_ranks)}, or more ranks",
        )
    sizes = nested_sizes(num_ranks)
    work = [work_of(length) for length in lengths]
    needed = [next(g for g in sizes if length <= g * max_tokens) for length in lengths]
    mean = sum(work) / num_ranks
    tried: list[_Dealt] = []
    for share in (1.0, 0.5, 0.25, 0.125, 0.0625):
        split = [
            _size(sizes, at_least, w, share * mean)
            for at_least, w in zip(needed, work, strict=True)
        ]
        tried.append(_deal(split, work, num_ranks))
        if max(tried[-1].work) <= _EVEN * mean:
            break
    best = min(tried, key=lambda dealt: max(dealt.work))
    of_rank = _sequences(best.of_groups, sizes, lengths, max_tokens)
    count = -(-max(1, *map(len, of_rank)) // multiple) * multiple
    for rank, own in enumerate(of_rank):
        own += [PackedSequence((), rank, 1)] * (count - len(own))
    return BalancedBatch(tuple(zip(*of_rank, strict=True)), tuple(best.work))


def _size(sizes: Sequence[int], at_least: int, work: float, limit: float) -> int:
    """Return the number of ranks that split a sample, so that none has more than `limit` of it."""
    fitting = (g for g in sizes if g >= at_least and work <= limit * g)
    return next(fitting, sizes[-1])


@dataclass(frozen=True)
class _Dealt:
    """Samples by (first rank, ranks) of their group, and the work of each rank."""

    of_groups: Mapping[tuple[int, int], list[int]]
    work: list[float]


def _deal(split: Sequence[int], work: Sequence[float], num_ranks: int) -> _Dealt:
    """Assign each sample to the least loaded group of its size, the largest sample first."""
    loads = [0.0] * num_ranks
    of_groups: dict[tuple[int, int], list[int]] = {}
    for sample in sorted(range(len(work)), key=lambda i: (-split[i], -work[i], i)):
        size = split[sample]
        first = min(range(0, num_ranks, size), key=lambda rank: max(loads[rank : rank + size]))
        of_groups.setdefault((first, size), []).append(sample)
        for rank in range(first, first + size):
            loads[rank] += work[sample] / size
    return _Dealt(of_groups, loads)


def _sequences(
    of_groups: Mapping[tuple[int, int], list[int]],
    sizes: Sequence[int],
    lengths: Sequence[int],
    max_tokens: int,
) -> list[list[PackedSequence]]:
    """Return the sequences of each rank in their order."""
    of_rank: list[list[PackedSequence]] = [[] for _ in range(sizes[-1])]
    for size in reversed(sizes):
        for first in range(0, sizes[-1], size):
            samples = of_groups.get((first, size), [])
            for packed in pack([lengths[i] for i in samples], size * max_tokens):
                sequence = PackedSequence(tuple(samples[i] for i in packed), first, size)
                for rank in range(first, first + size):
                    of_rank[rank].append(sequence)
    return of_rank
