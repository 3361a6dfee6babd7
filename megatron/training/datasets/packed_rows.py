"""Micro batches of samples of uneven length, split over as many ranks as their row needs.

(`--hybrid-context-parallel`.) A `Packing` says how one global batch becomes rows: arithmetic on the
lengths of its samples, the same on all ranks. As with other samplers all state is one number, the
samples consumed so far, so that a run continues with the row that came next.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import Dataset

from megatron.core.datasets.packing import BalancedBatch, WorkOf, balance
from megatron.training.run.context import BatchPlan

_KEPT = 8
"""Global batches whose rows are remembered."""


@dataclass(frozen=True, kw_only=True)
class RankOfPacking:
    """Who shares samples, and what one of them can hold.

    Attributes:
        rank, num_ranks: of the data- and context-parallel ranks together.
        max_tokens: of a row on one rank.
        divisor: what divides the tokens of a row on one rank; with several ranks, half of them.
        microbatch_multiple: what divides the number of micro batches.
    """

    rank: int
    num_ranks: int
    max_tokens: int
    divisor: int = 1
    microbatch_multiple: int = 1

    def row_length(self, num_tokens: int, num_ranks: int) -> int:
        """Return the length of a row of `num_tokens` that `num_ranks` ranks can split."""
        unit = self.divisor * (2 * num_ranks if num_ranks > 1 else 1)
        return max(1, -(-num_tokens // unit)) * unit


class Packing:
    """Cuts the global batches of a dataset into rows of even work.

    Args:
        dataset: has `num_tokens(number)` and `without_padding(number)`.
        share: see `RankOfPacking`.
        work_of: of a sample by its tokens.
        batch_size: samples of the global batch that begins after so many.
        first_sample: number in the run of the first sample of the dataset.
    """

    def __init__(
        self,
        dataset: Any,
        share: RankOfPacking,
        work_of: WorkOf,
        batch_size: Callable[[int], int],
        first_sample: int = 0,
    ) -> None:
        self.dataset = dataset
        self.share = share
        self.work_of = work_of
        self.first_sample = first_sample
        self._batch_size = batch_size
        # The sampler is ahead of the step that is planned by what workers prepare.
        self.lengths = functools.lru_cache(maxsize=_KEPT)(self._lengths)
        self.batch = functools.lru_cache(maxsize=_KEPT)(self._batch)

    def numbers(self, consumed: int) -> range:
        """Return the samples, by their number in the dataset, of the batch after `consumed`."""
        begin = consumed - self.first_sample
        return range(begin, min(begin + self._batch_size(consumed), len(self.dataset)))

    def _lengths(self, consumed: int) -> tuple[int, ...]:
        """Return the tokens of each sample of the batch after `consumed`."""
        return tuple(self.dataset.num_tokens(number) for number in self.numbers(consumed))

    def _batch(self, consumed: int) -> BalancedBatch:
        """Return the rows of the global batch after `consumed` samples of the run.

        Raises:
            DataError: a sample does not fit on all ranks together.
        """
        share = self.share
        # Rows are filled up to a length that can be split; so is what fits into one.
        max_tokens = max(1, share.max_tokens - share.max_tokens % (2 * share.divisor))
        ranks, multiple = share.num_ranks, share.microbatch_multiple
        return balance(self.lengths(consumed), ranks, max_tokens, self.work_of, multiple)

    def plan(self, consumed: int) -> BatchPlan:
        """Return how the step after `consumed` samples cuts them."""
        return BatchPlan(
            num_microbatches=len(self.batch(consumed).microbatches),
            micro_batch_size=1,
            global_batch_size=len(self.numbers(consumed)),
            sample_lengths=self.lengths(consumed),
        )


@dataclass(frozen=True)
class RowRequest:
    """The row that a rank computes next: numbers of samples in the dataset, and who splits it."""

    numbers: tuple[int, ...]
    num_ranks: int
    places: tuple[int, ...] = ()
    """Of these samples in the global batch."""


class PackedRowSampler:
    """Yields the row of this rank for one micro batch after the other.

    Args:
        packing: of the dataset.
        consumed_samples: of the dataset, where to begin: the end of a global batch.
    """

    def __init__(self, packing: Packing, consumed_samples: int) -> None:
        self.packing = packing
        self.consumed_samples = consumed_samples

    def __iter__(self) -> Iterator[list[RowRequest]]:
        """Yield lists of one request: a micro batch is one row."""
        packing = self.packing
        at = self.consumed_samples + packing.first_sample
        while numbers := packing.numbers(at):
            for rows in packing.batch(at).microbatches:
                row = rows[packing.share.rank]
                own = tuple(numbers[i] for i in row.samples)
                yield [RowRequest(own, row.num_ranks, row.samples)]
            at += len(numbers)


class PackedRows(Dataset[dict[str, Any]]):
    """Makes the row of a `RowRequest`."""

    def __init__(self, packing: Packing) -> None:
        self.dataset = packing.dataset
        self.share = packing.share

    def __len__(self) -> int:
        return len(self.dataset)

    def __getitem__(self, request: RowRequest) -> dict[str, Any]:
        """Return the samples of a request back to back, filled up to what its ranks can split.

        Returns:
            the entries of the samples, [s]; document_starts, int32 [s], where the sequence of each
            token begins in the row; padding_mask, bool [s], True where the row is only filled;
            local_cp_size, how many ranks split the row; what `share_microbatch` reads of its
            samples.
        """
        samples = [self.dataset.without_padding(number) for number in request.numbers]
        length = self.share.row_length(sum(map(_length, samples)), request.num_ranks)
        if not samples:
            nothing = self.dataset.without_padding(0)
            samples = [{name: value[:0] for name, value in nothing.items()}]
        row = {
            name: _filled(torch.cat([sample[name] for sample in samples]), length)
            for name, value in samples[0].items()
            if isinstance(value, Tensor) and value.dim() == 1
        }
        row["document_starts"] = _document_starts(samples, length)
        filled = sum(map(_length, samples))
        row["padding_mask"] = torch.arange(length) >= filled
        joined = zip(request.places, samples, strict=False)
        return {
            **row,
            "local_cp_size": request.num_ranks,
            "num_joined_samples": len(request.numbers),
            "joined_samples": _filled(
                torch.cat([_places(i, *one) for i, one in enumerate(joined)], 1)
                if request.numbers
                else torch.zeros(4, 0, dtype=torch.long),
                length,
            ),
        }


def _length(sample: dict[str, Any]) -> int:
    return len(sample["tokens"])


def _filled(x: Tensor, length: int) -> Tensor:
    """Return x [..., n] with zeros after it, [..., length]."""
    return torch.nn.functional.pad(x, (0, length - x.shape[-1]))


def _places(place: int, number: int, sample: dict[str, Any]) -> Tensor:
    """Return what `share_microbatch` reads of a sample, int64 [4, n].

    Args:
        place: of the sample in the row; number: in the global batch.
    """
    size, starts = _length(sample), sample.get("document_starts")
    num_sequences = 1 if starts is None else len(starts.unique())
    columns = (place, number, torch.arange(size), num_sequences)
    return torch.stack([torch.as_tensor(x).expand(size) for x in columns])


def _document_starts(samples: Sequence[dict[str, Any]], length: int) -> Tensor:
    """Return where the sequence of each token of the row begins; what fills it is one, too."""
    starts, before = torch.empty(length, dtype=torch.int32), 0
    for sample in samples:
        size = _length(sample)
        within = sample.get("document_starts", torch.zeros(size, dtype=torch.int32))
        starts[before : before + size] = within + before
        before += size
    starts[before:] = before
    return starts
