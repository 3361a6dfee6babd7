"""A corpus without files, for trying a layout."""

from __future__ import annotations

from typing import Any

import numpy as np

from megatron.core.foundation.errors import DataError


class MockTokens:
    """A computed corpus: documents of random length with tokens 1, 2, 3, ... and an end token.

    Args:
        tokenizer: has `vocab_size` and `eod`.
        num_classes: vocabulary size of the model, which may be smaller than the tokenizer's.
    """

    num_documents = 10_000
    longest_document = 4096

    def __init__(self, tokenizer: Any, num_classes: int | None = None) -> None:
        most = _common_size(tokenizer, num_classes)
        eod = special_id(tokenizer, "eod")
        self._eod = None if eod is None or eod >= most else eod
        self._cycle = max(1, min(self.longest_document, most - 2))
        random = np.random.default_rng(seed=0)
        self.sequence_lengths = random.integers(
            1, self.longest_document, size=self.num_documents, dtype=np.int32
        )

    def __len__(self) -> int:
        return self.num_documents

    def get(self, idx: int, offset: int = 0, length: int | None = None) -> np.ndarray:
        """Return part of document `idx`, int64."""
        available = int(self.sequence_lengths[idx])
        tokens = np.arange(available, dtype=np.int64) % self._cycle + 1
        if self._eod is not None:
            tokens[-1] = self._eod
        return tokens[offset:] if length is None else tokens[offset : offset + length]


class MockSentences:
    """A computed corpus: documents of sentences of random length and random words.

    The words are drawn from the upper half of the vocabulary, because special tokens are usually in
    the lower half. Arguments as of `MockTokens`.
    """

    num_documents = 2_000

    def __init__(self, tokenizer: Any, num_classes: int | None = None) -> None:
        random = np.random.default_rng(seed=0)
        counts = random.integers(2, 20, self.num_documents)
        self.document_indices = np.concatenate([[0], np.cumsum(counts)])
        size = int(self.document_indices[-1])
        self.sequence_lengths = random.integers(4, 40, size, dtype=np.int32)
        self._vocab_size = _common_size(tokenizer, num_classes)

    def __len__(self) -> int:
        return len(self.sequence_lengths)

    def get(self, idx: int) -> np.ndarray:
        """Return sentence `idx`, int64."""
        random = np.random.default_rng((0, idx))
        lowest, count = self._vocab_size // 2, int(self.sequence_lengths[idx])
        return random.integers(lowest, self._vocab_size, count)


def _common_size(tokenizer: Any, num_classes: int | None) -> int:
    """Return the number of ids that the tokenizer and the model both have."""
    ids = int(tokenizer.vocab_size)
    return min(ids, num_classes or ids)


def special_id(tokenizer: object, name: str) -> int | None:
    """Return a special id, or None where the tokenizer has none."""
    try:
        value = getattr(tokenizer, name, None)
    except (NotImplementedError, DataError):
        return None
    return None if value is None or value < 0 else int(value)
