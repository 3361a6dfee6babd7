"""Two orders of a corpus's samples, and how the tokens of a sample are fetched.

`ShuffledDocuments` is Megatron-LM's order: three index arrays, one entry per document and sample
(see `index_building`). `ShuffledWindows` has no arrays: the documents of a split are contiguous in
the token file, an epoch cuts them into windows of `sequence_length` tokens, and a keyed permutation
orders the windows. It opens in microseconds at any size and reads every sample in one piece. Its
disadvantage: documents that are neighbours in the file stay neighbours inside a window, so a corpus
sorted by source should be shuffled once when it is written.

No torch import.
"""

from __future__ import annotations

from bisect import bisect_right
from typing import Any

import numpy as np

from megatron.core.datasets import native
from megatron.core.datasets.corpus.index_file import DType
from megatron.core.datasets.order.permutation import KeyedPermutation

Fetched = tuple[int, int, int, int]
"""Statistics of a `read`: number of tokens written, from the first element on; min(smallest id, 0);
max(largest id, 0); number of pad ids."""


def _seen(tokens: np.ndarray, filled: int, pad: int) -> Fetched:
    got = tokens[:filled]
    num_pads = int(np.count_nonzero(got == pad)) if pad >= 0 else 0
    lowest = int(got.min(initial=0))
    return filled, lowest, int(got.max(initial=0)), num_pads


class ShuffledDocuments:
    """Samples along a shuffled stream of documents.

    Args:
        corpus: has `get(document, offset, length)`; `read_tokens` and `buffer` make it faster.
        documents, samples, shuffle: the document, sample and shuffle index of `index_building`.
        extra_token: 1 if a sample overlaps the next sample by one token.
        pad: id to count.
    """

    def __init__(
        self,
        corpus: Any,
        documents: np.ndarray,
        samples: np.ndarray,
        shuffle: np.ndarray,
        *,
        extra_token: int,
        pad: int,
    ) -> None:
        self._corpus = corpus
        # Plain views: indexing a numpy.memmap creates a Python object for every slice.
        self._documents = np.asarray(documents)
        self._samples = np.asarray(samples)
        self._shuffle = np.asarray(shuffle)
        self._extra_token = extra_token
        self._pad = pad
        self._mapped: tuple[Any, ...] | None = None
        buffer = getattr(corpus, "buffer", None)
        if native.compiled and buffer is not None and np.issubdtype(corpus.dtype, np.integer):
            self._mapped = (
                buffer,
                DType.code_from_dtype(corpus.dtype),
                corpus.sequence_pointers,
                corpus.sequence_lengths,
                self._documents,
                self._samples,
                int(self._samples.itemsize == 8),
                self._shuffle,
                int(self._shuffle.itemsize == 8),
            )

    def __len__(self) -> int:
        return len(self._shuffle)

    def read(self, idx: int, out: np.ndarray) -> Fetched:
        """Copy sample `idx` to the front of `out`, int64."""
        if self._mapped is not None:
            self._corpus.check_unchanged()
            fetched: Fetched = native.compiled.gather(
                *self._mapped, idx, self._extra_token, self._pad, out
            )
            return fetched
        sample = int(self._shuffle[idx])
        (first, offset), (last, end) = self._samples[sample : sample + 2].tolist()
        end += self._extra_token
        filled = 0
        for document, begin, count in self._runs(first, offset, last, end):
            out[filled : filled + count] = _read_run(self._corpus, document, begin, count)
            filled += count
        return _seen(out, filled, self._pad)

    def _runs(self, first: int, offset: int, last: int, end: int) -> list[tuple[int, int, int]]:
        """Return (document, first token, tokens) of each contiguous piece."""
        documents = self._documents[first : last + 1]
        lengths = self._corpus.sequence_lengths[documents].astype(np.int64)
        lengths[-1] = end
        lengths[0] -= offset
        starts = np.flatnonzero(np.diff(documents, prepend=documents[0] - 2) != 1)
        counts = np.add.reduceat(lengths, starts)
        begins = np.zeros(len(starts), np.int64)
        begins[0] = offset
        heads = documents[starts]
        return list(zip(heads.tolist(), begins.tolist(), counts.tolist(), strict=True))

    def locate_sample(self, idx: int, at: int) -> tuple[int, int]:
        """Return (document, position in it) of the `at`-th token of sample `idx`."""
        sample = int(self._shuffle[idx])
        position, offset = self._samples[sample].tolist()
        at += offset
        while at >= (length := int(self._corpus.sequence_lengths[self._documents[position]])):
            at -= length
            position += 1
        return int(self._documents[position]), at


class ShuffledWindows:
    """Samples that are windows of the token file, in a keyed order.

    Epoch e begins `shift(e)` tokens into the split and wraps around, so that windows of different
    epochs are cut at different places; epoch 0 begins at the first token. An epoch contains each of
    its windows once.

    Args:
        stream: the tokens of the split.
        sequence_length: distance of two windows.
        extra_token: number of additional tokens of a window.
        num_samples: number of samples; None is one epoch.
        keeps_partial: keep an incomplete window at the end of the only epoch.
        seed: seed of the order.
        pad: id to count.
    """

    def __init__(
        self,
        stream: TokenStream,
        *,
        sequence_length: int,
        extra_token: int,
        num_samples: int | None,
        keeps_partial: bool,
        seed: int,
        pad: int,
    ) -> None:
        self._stream = stream
        self._stride = sequence_length
        self._extra_token = extra_token
        self._seed = seed
        self._pad = pad
        full, rest = divmod(max(stream.num_tokens - extra_token, 0), sequence_length)
        self._is_one_epoch = num_samples is None
        self._per_epoch = full + int(bool(rest) and keeps_partial and self._is_one_epoch)
        self._size = self._per_epoch if num_samples is None else num_samples
        if self._size > self._per_epoch:
            # Fewer tokens than a window: every window repeats the whole split.
            self._per_epoch = max(self._per_epoch, 1)
        self._epoch: tuple[int, KeyedPermutation, int] | None = None

    def __len__(self) -> int:
        return self._size

    def window(self, idx: int) -> int:
        """Return the position in the split of the first token of sample `idx`."""
        if not 0 <= idx < self._size:
            raise IndexError(f"sample {idx} of {self._size}")
        epoch, position = divmod(idx, self._per_epoch)
        if self._epoch is None or self._epoch[0] != epoch:
            order = KeyedPermutation(self._per_epoch, "windows", self._seed, epoch)
            num_tokens = self._stream.num_tokens
            shifts = KeyedPermutation(num_tokens, "shift", self._seed)
            self._epoch = epoch, order, shifts[epoch % num_tokens] if epoch else 0
        _, order, shift = self._epoch
        return (shift + order[position] * self._stride) % self._stream.num_tokens

    def read(self, idx: int, out: np.ndarray) -> Fetched:
        begin = self.window(idx)
        wanted, num_tokens = self._stride + self._extra_token, self._stream.num_tokens
        if self._is_one_epoch:
            wanted = min(wanted, num_tokens - begin)
        filled = 0
        while filled < wanted:
            count = min(wanted - filled, num_tokens - begin)
            out[filled : filled + count] = self._stream.read(begin, count)
            filled += count
            begin = 0  # wrap around at the end of the split
        return _seen(out, filled, self._pad)

    def locate_sample(self, idx: int, at: int) -> tuple[int, int]:
        return self._stream.locate((self.window(idx) + at) % self._stream.num_tokens)


class TokenStream:
    """The tokens of contiguous documents as one sequence.

    Args:
        corpus: with `sequence_pointers` and `read_tokens` its file is addressed directly; others
            are read document by document, with a table of the documents' ends.
        documents: numbers of the documents.
    """

    def __init__(self, corpus: Any, documents: range) -> None:
        self._corpus = corpus
        self._documents = documents
        self._ends: np.ndarray | None = None
        pointers = getattr(corpus, "sequence_pointers", None)
        lengths = corpus.sequence_lengths
        if not documents:
            self.num_tokens = 0
        elif pointers is None:
            ends = np.cumsum(lengths[documents.start : documents.stop], dtype=np.int64)
            self._ends, self.num_tokens = ends, int(ends[-1])
        else:
            self._token_bytes = np.dtype(corpus.dtype).itemsize
            self._first = int(pointers[documents.start]) // self._token_bytes
            last = documents.stop - 1
            end = int(pointers[last]) // self._token_bytes + int(lengths[last])
            self.num_tokens = end - self._first

    def read(self, begin: int, count: int) -> np.ndarray:
        """Return `count` tokens from token `begin` on."""
        if self._ends is None:
            return self._corpus.read_tokens(self._first + begin, count)
        return _read_documents(self._corpus, *self.locate(begin), count)

    def locate(self, token: int) -> tuple[int, int]:
        """Return (document, position in it) of a token."""
        if self._ends is not None:
            position = int(np.searchsorted(self._ends, token, side="right"))
            return self._documents[position], token - int(self._ends[position - 1] * (position > 0))
        pointers = self._corpus.sequence_pointers
        at = (self._first + token) * self._token_bytes
        # Not numpy's search, which would copy the whole unaligned array.
        document = bisect_right(pointers, at, self._documents.start, self._documents.stop) - 1
        return document, (at - int(pointers[document])) // self._token_bytes


def _read_run(corpus: Any, document: int, offset: int, count: int) -> np.ndarray:
    """Return `count` tokens from `offset` of `document` on, running into the next documents."""
    read_tokens = getattr(corpus, "read_tokens", None)
    if read_tokens is not None:
        first = int(corpus.sequence_pointers[document]) // np.dtype(corpus.dtype).itemsize
        return read_tokens(first + offset, count)
    return _read_documents(corpus, document, offset, count)


def _read_documents(corpus: Any, document: int, offset: int, count: int) -> np.ndarray:
    pieces = []
    while count > 0:
        taken = min(count, int(corpus.sequence_lengths[document]) - offset)
        pieces.append(corpus.get(document, offset=offset, length=taken))
        document, offset, count = document + 1, 0, count - taken
    return np.concatenate(pieces) if pieces else np.empty(0, np.int64)
