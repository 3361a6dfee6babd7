"""The sample order of a GPT corpus as pure arithmetic on numpy arrays.

Three arrays turn a corpus into samples of a fixed length:

* document index: the documents of every epoch, shuffled;
* sample index: the position in this stream of documents where each sample begins;
* shuffle index: the order of reading the samples.

The arrays equal the arrays of Megatron-LM for the same inputs. The original walks through the
documents. Here sample k begins exactly k * sequence_length tokens into the stream, so a running sum
and one sorted search replace the walk; the compiled part, if it was built, walks without them.
"""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from megatron.core.datasets import native
from megatron.core.foundation.errors import DataError

_INT32_MAX = int(np.iinfo(np.int32).max)
_UINT32_MAX = int(np.iinfo(np.uint32).max)
_SEARCH_BLOCK = 1 << 22
"""Samples located at a time: bounds the scratch memory at about 100 MiB."""

_NUMBER = re.compile(r"[.0-9]+")

_SEPARATE_BELOW = 0.80
"""If less than this share of the last epoch is used, it is shuffled separately."""


@dataclass(frozen=True, kw_only=True)
class EpochPlan:
    """The number of epochs, and whether the last epoch is shuffled separately.

    If only a small part of the last epoch is needed, it is shuffled separately. Otherwise its
    documents would be seen more often than the others during the first epochs.
    """

    tokens_per_epoch: int
    sequence_length: int
    extra_token: int
    """1 if a sample holds one more token than its length, for the label of the last position."""
    num_epochs: int
    separate_final_epoch: bool
    samples_before_final_epoch: int
    """Whole samples in all epochs but the last; used only with `separate_final_epoch`."""

    def num_samples(self, *, drop_last: bool = True) -> int:
        """Return the samples that all epochs hold, with or without an incomplete last one."""
        tokens = self.num_epochs * self.tokens_per_epoch - self.extra_token
        if drop_last:
            return tokens // self.sequence_length
        # Single precision on purpose: Megatron-LM rounds here, and the arrays must be equal.
        return int(np.ceil(np.float32(tokens) / np.float32(self.sequence_length)))


def plan_epochs(
    tokens_per_epoch: int, sequence_length: int, extra_token: int, num_samples: int | None
) -> EpochPlan:
    """Find the smallest number of epochs that gives `num_samples` samples.

    Args:
        tokens_per_epoch: sum of the lengths of the documents of this split.
        sequence_length: tokens per sample, without the extra one.
        extra_token: 0 or 1, see `EpochPlan`.
        num_samples: wanted number of samples; None or 0 means one epoch.
    Raises:
        DataError: there are no tokens.
    """
    if tokens_per_epoch <= 0:
        raise DataError(
            "the documents of this split hold no tokens.",
            rule="a split must hold at least one token to be repeated",
            flags=["--data-path", "--split"],
            fix="check that the corpus was preprocessed with the right --json-keys",
        )
    num_epochs = 1
    if num_samples is not None:
        num_epochs = max(1, -(-(num_samples * sequence_length + extra_token) // tokens_per_epoch))
    before, separate = 0, False
    if num_epochs > 1:
        assert num_samples is not None
        tokens_before = (num_epochs - 1) * tokens_per_epoch - extra_token
        before = tokens_before // sequence_length
        in_last = num_samples - before
        per_epoch = (tokens_per_epoch - extra_token) // sequence_length
        assert 0 <= in_last <= per_epoch + 1, (num_samples, before, per_epoch)
        separate = in_last < int(_SEPARATE_BELOW * per_epoch)
    return EpochPlan(
        tokens_per_epoch=tokens_per_epoch,
        sequence_length=sequence_length,
        extra_token=extra_token,
        num_epochs=num_epochs,
        separate_final_epoch=separate,
        samples_before_final_epoch=before,
    )


def build_document_index(
    documents: np.ndarray | range, plan: EpochPlan, random: np.random.RandomState
) -> np.ndarray:
    """Repeat and shuffle the documents.

    Args:
        documents: ids of the N documents of the split.
        random: advanced by one shuffle, or by two with `separate_final_epoch`.
    Returns:
        int32 [num_epochs * N].
    """
    order = np.tile(document_ids(documents).astype(np.int32, copy=False), plan.num_epochs)
    if plan.separate_final_epoch:
        split_at = (plan.num_epochs - 1) * len(documents)
        _shuffle(random, order[:split_at])
        _shuffle(random, order[split_at:])
    else:
        _shuffle(random, order)
    return order


def build_sample_index(
    sequence_lengths: np.ndarray,
    document_index: np.ndarray,
    plan: EpochPlan,
    *,
    drop_last: bool = True,
) -> np.ndarray:
    """Find where each sample begins in the stream of documents.

    Sample k takes `sequence_length + extra_token` tokens from its start; the next one begins
    `sequence_length` tokens later, in the document that holds the last token taken.

    Args:
        sequence_lengths: int32 [S], tokens of each document of the corpus.
        document_index: [P], from `build_document_index`.
        drop_last: leave out a last sample that the stream cannot fill.
    Returns:
        [M + 1, 2], rows (position in `document_index`, token offset in that document); int32
        unless that is too small. The last row is the end of the last sample.
    """
    num_samples = plan.num_samples(drop_last=drop_last)
    widest = max(len(document_index), int(sequence_lengths.max(initial=0)))
    index = np.zeros((num_samples + 1, 2), np.int32 if widest <= _INT32_MAX else np.int64)
    if native.compiled is not None:
        native.compiled.sample_index(
            np.ascontiguousarray(sequence_lengths, np.int32),
            np.ascontiguousarray(document_index, np.int32),
            plan.sequence_length,
            plan.extra_token,
            index.dtype == np.int64,
            index,
            num_samples,
        )
        return index
    lengths = sequence_lengths[document_index]
    ends = np.cumsum(lengths, dtype=np.int64)
    total = int(ends[-1])
    for start in range(1, num_samples + 1, _SEARCH_BLOCK):
        rows = np.arange(start, min(start + _SEARCH_BLOCK, num_samples + 1), dtype=np.int64)
        begins = rows * plan.sequence_length
        # The token before the next sample's own share: its document is where the walk stops.
        last_taken = begins + (plan.extra_token - 1)
        inside = int(np.searchsorted(last_taken, total))
        position = np.searchsorted(ends, last_taken[:inside], side="right")
        index[start : start + inside, 0] = position
        index[start : start + inside, 1] = begins[:inside] - (ends[position] - lengths[position])
        # The stream ran out: the walk stops with the last document.
        index[start + inside : start + len(rows), 0] = len(document_index) - 1
        index[start + inside : start + len(rows), 1] = int(lengths[-1]) - plan.extra_token
    return index


def build_shuffle_index(
    num_samples: int, plan: EpochPlan, random: np.random.RandomState
) -> np.ndarray:
    """Shuffle the samples; samples of a separate last epoch stay at the end.

    Args:
        num_samples: M of the sample index.
        random: advanced by one shuffle, or by two.
    Returns:
        uint32 [M], int64 if that is too small.
    """
    dtype = np.uint32 if num_samples < _UINT32_MAX - 1 else np.int64
    order = np.arange(num_samples, dtype=dtype)
    if plan.separate_final_epoch:
        _shuffle(random, order[: plan.samples_before_final_epoch])
        _shuffle(random, order[plan.samples_before_final_epoch :])
    else:
        _shuffle(random, order)
    return order


def _shuffle(random: np.random.RandomState, order: np.ndarray) -> None:
    """Shuffle exactly like `random.shuffle(order)`; the compiled form takes half the time."""
    if native.compiled is None or order.itemsize != 4:
        random.shuffle(order)
        return
    state: Any = random.get_state()
    name, words, position, *rest = state
    key = np.array(words, np.uint32)
    random.set_state((name, key, native.compiled.shuffle(order, key, position), *rest))


def split_boundaries(split: str) -> list[tuple[float, float] | None]:
    """Turn "99,1,0" into the (begin, end) shares of train, valid and test.

    Returns:
        three entries; None for a split of width zero.
    Raises:
        DataError: no numbers, more than three, or a sum of zero.
    """
    try:
        numbers = [float(text) for text in _NUMBER.findall(split)]
    except ValueError:
        numbers = []
    if not 1 <= len(numbers) <= 3 or sum(numbers) <= 0:
        raise DataError(
            f"split {split!r} does not name the shares of train, valid and test.",
            rule="up to three numbers that are not all zero, separated by commas",
            flags=["--split"],
            fix="for example --split 99,1,0",
        )
    shares = np.array(numbers + [0.0] * (3 - len(numbers)), np.float64)
    shares = (shares / np.sum(shares)).tolist()
    ends = [0.0]
    for share in shares:
        ends.append(ends[-1] + share)
    pairs = zip(ends[:-1], ends[1:], strict=True)
    return [None if begin == end else (begin, end) for begin, end in pairs]


def split_bounds(share: tuple[float, float], num_documents: int) -> range:
    """Return the documents of a share (bounds rounded half to even)."""
    begin, end = (int(round(bound * num_documents)) for bound in share)
    return range(begin, end)


def document_ids(documents: np.ndarray | range) -> np.ndarray:
    """Return documents as int32 ids."""
    if isinstance(documents, range):
        return np.arange(documents.start, documents.stop, dtype=np.int32)
    return np.asarray(documents)


def as_range(documents: np.ndarray | range) -> np.ndarray | range:
    """Return consecutive documents as a range, and others as they are."""
    if isinstance(documents, range) or not len(documents) or (np.diff(documents) != 1).any():
        return documents
    return range(int(documents[0]), int(documents[-1]) + 1)


def sizes_of_blend(weights: Sequence[float], size: int, surplus: float = 0.0) -> list[int]:
    """Return the samples each dataset gives to a blend of about `size` samples.

    Args:
        weights: normalised.
        surplus: share built on top, because the greedy rule may take a few more.
    """
    return [math.ceil(math.ceil(size * weight) * (1 + surplus)) for weight in weights]
