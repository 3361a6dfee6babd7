"""Dynamic context parallelism: the number of ranks per packed sequence follows its length.

The flag is `--hybrid-context-parallel`. A `Packing` packs the samples of one global batch into
sequences. It computes only with the lengths of the samples, with equal results on all ranks. As in
other samplers, the only state is the number of consumed samples, so a resumed run continues with
the next sequence.
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
from megatron.training.run.state import BatchPlan

_KEPT = 8
"""Global batches whose packing is cached."""


@dataclass(frozen=True, kw_only=True)
class DpCpRank:
    """Position of this rank among the ranks that share samples, and limits of packing.

    Attributes:
        rank, num_ranks: position in the data- and context-parallel ranks, and their number.
        max_tokens: maximum number of tokens of a sequence per rank.
        divisor: the local sequence length is a multiple of it (of twice it if several ranks share
            the sequence).
        microbatch_multiple: the number of micro batches is a multiple of it.
    """

    rank: int
    num_ranks: int
    max_tokens: int
    divisor: int = 1
    microbatch_multiple: int = 1

    def padded_length(self, num_tokens: int, num_ranks: int) -> int:
        """Return the length of `num_tokens` with padding, which `num_ranks` can split."""
        unit = self.divisor * (2 * num_ranks if num_ranks > 1 else 1)
        return max(1, -(-num_tokens // unit)) * unit


class Packing:
    """Packs the global batches of a dataset into sequences with balanced work per rank.

    Args:
        dataset: has `num_tokens(number)` and `without_padding(number)`.
        work_of: number of tokens of a sample -> its work.
        batch_size: consumed samples -> size of the next global batch.
        first_sample: number in the run of the first sample of the dataset.
    """

    def __init__(
        self,
        dataset: Any,
        rank: DpCpRank,
        work_of: WorkOf,
        batch_size: Callable[[int], int],
        first_sample: int = 0,
    ) -> None:
        self.dataset = dataset
        self.rank = rank
        self.work_of = work_of
        self.first_sample = first_sample
        self._batch_size = batch_size
        # Workers prepare batches in advance, so the sampler is ahead of the planned step.
        self.lengths = functools.lru_cache(maxsize=_KEPT)(self._lengths)
        self.batch = functools.lru_cache(maxsize=_KEPT)(self._batch)

    def numbers(self, consumed: int) -> range:
        """Return the numbers in the dataset of the samples in the batch after `consumed`."""
        begin = consumed - self.first_sample
        return range(begin, min(begin + self._batch_size(consumed), len(self.dataset)))

    def _lengths(self, consumed: int) -> tuple[int, ...]:
        """Return the tokens of each sample of the batch after `consumed`."""
        return tuple(self.dataset.num_tokens(number) for number in self.numbers(consumed))

    def _batch(self, consumed: int) -> BalancedBatch:
        """Return the packed sequences of the global batch after `consumed` samples of the run.

        Raises:
            DataError: a sample does not fit on all ranks together.
        """
        rank = self.rank
        # Sequences are padded to a length that can be split; the limit must be such a length.
        max_tokens = max(1, rank.max_tokens - rank.max_tokens % (2 * rank.divisor))
        ranks, multiple = rank.num_ranks, rank.microbatch_multiple
        return balance(self.lengths(consumed), ranks, max_tokens, self.work_of, multiple)

    def plan(self, consumed: int) -> BatchPlan:
        """Return the plan of the step after `consumed` samples."""
        return BatchPlan(
            num_microbatches=len(self.batch(consumed).microbatches),
            micro_batch_size=1,
            global_batch_size=len(self.numbers(consumed)),
            sample_lengths=self.lengths(consumed),
        )


@dataclass(frozen=True)
class PackedSequenceRequest:
    """The next packed sequence of a rank: its samples' numbers, and how many ranks split it."""

    numbers: tuple[int, ...]
    num_ranks: int
    places: tuple[int, ...] = ()
    """Positions of these samples in the global batch."""


class PackedSequenceSampler:
    """Yields the packed sequence of this rank for one micro batch after the other.

    Args:
        consumed_samples: samples of the dataset before the first sequence, the end of a global
            batch.
    """

    def __init__(self, packing: Packing, consumed_samples: int) -> None:
        self.packing = packing
        self.consumed_samples = consumed_samples

    def __iter__(self) -> Iterator[list[PackedSequenceRequest]]:
        """Yield lists of one request: a micro batch is one packed sequence."""
        packing = self.packing
        at = self.consumed_samples + packing.first_sample
        while numbers := packing.numbers(at):
            for sequences in packing.batch(at).microbatches:
                own = sequences[packing.rank.rank]
                samples = tuple(numbers[i] for i in own.samples)
                yield [PackedSequenceRequest(samples, own.num_ranks, own.samples)]
            at += len(numbers)


class PackedSequences(Dataset[dict[str, Any]]):
    """A dataset that returns the packed sequence of a `PackedSequenceRequest`."""

    def __init__(self, packing: Packing) -> None:
        self.dataset = packing.dataset
        self.rank = packing.rank

    def __len__(self) -> int:
        return len(self.dataset)

    def __getitem__(self, request: PackedSequenceRequest) -> dict[str, Any]:
        """Return the concatenated samples of a request, padded so that its ranks can split them.

        Returns:
            the entries of the samples, [s]; document_starts, int32 [s], first token of each token's
            document; padding_mask, bool [s], True on padding; local_cp_size, number of ranks per
            sequence; num_joined_samples and joined_samples, which `share_microbatch` reads.
        """
        samples = [self.dataset.without_padding(number) for number in request.numbers]
        length = self.rank.padded_length(sum(map(_length, samples)), request.num_ranks)
        if not samples:
            nothing = self.dataset.without_padding(0)
            samples = [{name: value[:0] for name, value in nothing.items()}]
        packed = {
            name: _padded(torch.cat([sample[name] for sample in samples]), length)
            for name, value in samples[0].items()
            if isinstance(value, Tensor) and value.dim() == 1
        }
        packed["document_starts"] = _document_starts(samples, length)
        filled = sum(map(_length, samples))
        packed["padding_mask"] = torch.arange(length) >= filled
        joined = zip(request.places, samples, strict=False)
        return {
            **packed,
            "local_cp_size": request.num_ranks,
            "num_joined_samples": len(request.numbers),
            "joined_samples": _padded(
                torch.cat([_places(i, *one) for i, one in enumerate(joined)], 1)
                if request.numbers
                else torch.zeros(4, 0, dtype=torch.long),
                length,
            ),
        }


def _length(sample: dict[str, Any]) -> int:
    return len(sample["tokens"])


def _padded(x: Tensor, length: int) -> Tensor:
    """Return x [..., n] with zeros after it, [..., length]."""
    return torch.nn.functional.pad(x, (0, length - x.shape[-1]))


def _places(place: int, number: int, sample: dict[str, Any]) -> Tensor:
    """Return the description of a sample that `share_microbatch` reads, int64 [4, n].

    Args:
        place: position of the sample in the packed sequence.
        number: position in the global batch.
    """
    size, starts = _length(sample), sample.get("document_starts")
    num_sequences = 1 if starts is None else len(starts.unique())
    columns = (place, number, torch.arange(size), num_sequences)
    return torch.stack([torch.as_tensor(x).expand(size) for x in columns])


def _document_starts(samples: Sequence[dict[str, Any]], length: int) -> Tensor:
    """Return the first token of each token's document; the padding counts as one document."""
    starts, before = torch.empty(length, dtype=torch.int32), 0
    for sample in samples:
        size = _length(sample)
        within = sample.get("document_starts", torch.zeros(size, dtype=torch.int32))
        starts[before : before + size] = within + before
        before += size
    starts[before:] = before
    return starts
