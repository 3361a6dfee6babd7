"""Runs of sentences as samples with some hidden words.

J. Devlin et al., "BERT", section 3.1 and appendix A.2, arXiv 1810.04805; runs of several words:
M. Joshi et al., "SpanBERT", section 3.1, arXiv 1907.10529.

The corpus has one sequence for each sentence (`tools/preprocess_data.py --split-sentences`). The
seed and the split are the key of a sample's sentences; the order of samples is also keyed by the
epoch, and the hidden words by the number of the sample. None of it depends on the layout or on
earlier reads.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from megatron.core.datasets.blended_megatron_dataset_config import BlendedMegatronDatasetConfig
from megatron.core.datasets.indexed_dataset import IndexedDataset
from megatron.core.datasets.megatron_dataset import MegatronDataset, outside_vocabulary
from megatron.core.datasets.mock_tokens import MockSentences
from megatron.core.datasets.order.permutation import KeyedPermutation
from megatron.core.datasets.utils import Split
from megatron.core.foundation.errors import ConfigError, DataError, refuse_given

GEOMETRIC_SUCCESS = 0.2
"""Parameter of the geometric distribution of the lengths of runs (SpanBERT, section 3.1)."""
_BEGIN_MARKS = ("▁", "Ġ")
"""First characters of tokens that begin a word, in vocabularies that mark these tokens."""


@dataclass(kw_only=True)
class MaskedWordPieceDatasetConfig(BlendedMegatronDatasetConfig):
    """Settings of datasets that hide words, under Megatron's names."""

    masking_probability: float = 0.15
    """Share of a sample's tokens that is hidden."""
    short_sequence_probability: float = 0.1
    """Probability that a sample is made shorter, to a length drawn from 2 to the full one."""
    masking_max_ngram: int = 3
    """Longest run of words that is hidden together."""
    masking_do_full_word: bool = True
    """Hide all tokens of a word, or none."""
    masking_do_permutation: bool = False
    """Also put some words in another order: refused."""
    vocab_size: int | None = None
    """Vocabulary size of the model, which may be smaller than the tokenizer's."""
    masking_use_longer_ngrams: bool = False
    """Draw a run of n words with a probability proportional to n, instead of 1/n."""
    masking_use_geometric_distribution: bool = False
    """Draw n from a geometric distribution, cut at `masking_max_ngram`."""

    def __post_init__(self) -> None:
        super().__post_init__()
        refuse_given(
            type(self).__name__,
            {"masking_do_permutation": self.masking_do_permutation},
            rule="words are hidden, and stay in their order",
            fix="leave it out",
        )
        for name, flag in (
            ("masking_probability", "--mask-prob"),
            ("short_sequence_probability", "--short-seq-prob"),
        ):
            value = getattr(self, name)
            if not 0.0 <= value <= 1.0:
                raise ConfigError(
                    f"{name}={value}.",
                    rule="it is a probability, between 0 and 1",
                    flags=[flag],
                    fix=f"use {flag} 0.15",
                )
        if self.masking_max_ngram < 1:
            raise ConfigError(
                f"masking_max_ngram={self.masking_max_ngram}.",
                rule="a run has at least one word",
                fix="use masking_max_ngram=3",
            )
        if self.masking_use_longer_ngrams and self.masking_use_geometric_distribution:
            raise ConfigError(
                "masking_use_longer_ngrams with masking_use_geometric_distribution.",
                rule="lengths are drawn from one distribution",
                fix="drop one of them",
            )


class MaskedWordPieceDataset(MegatronDataset):
    """Runs of consecutive sentences of one document, each once in every epoch.

    Args: as of `MegatronDataset`.
    Raises:
        DataError: no document has enough sentences.
    """

    config: MaskedWordPieceDatasetConfig
    min_sentences = 1
    """Least number of sentences in a sample."""
    num_added = 0
    """Special tokens that are added to a sample's text."""

    def __init__(
        self,
        dataset: Any,
        dataset_path: str | None,
        indices: np.ndarray | range,
        num_samples: int | None,
        index_split: Split,
        config: MaskedWordPieceDatasetConfig,
    ) -> None:
        super().__init__(dataset, dataset_path, indices, num_samples, index_split, config)
        ids = int(config.tokenizer.vocab_size)
        self._vocab_size = min(ids, config.vocab_size or ids)
        self._continues_word = continues_word(config.tokenizer, self._vocab_size)
        self._runs = self._build_runs()
        if not len(self._runs):
            raise DataError(
                f"the {index_split.name} part of {dataset_path} has no document of"
                f" {self.min_sentences} sentences.",
                rule="a sample is made of sentences, each a sequence of the corpus",
                flags=["--data-path", "--split"],
                fix="preprocess with --split-sentences, or choose another split",
            )

    @staticmethod
    def numel_low_level_dataset(low_level_dataset: Any) -> int:
        return len(low_level_dataset.document_indices) - 1

    @staticmethod
    def build_low_level_dataset(dataset_path: str | None, config: Any) -> Any:
        """Open and check a corpus; without a path return a computed corpus."""
        if dataset_path is None:
            return MockSentences(config.tokenizer, config.vocab_size)
        return IndexedDataset(
            dataset_path,
            mmap=config.mmap_bin_files,
            object_storage_cache=config.object_storage_cache_path,
        )

    @staticmethod
    def _key_config_attributes() -> list[str]:
        return [
            *MegatronDataset._key_config_attributes(),
            "masking_probability",
            "short_sequence_probability",
            "masking_max_ngram",
            "masking_do_full_word",
            "masking_use_longer_ngrams",
            "masking_use_geometric_distribution",
        ]

    @property
    def longest_text(self) -> int:
        """Tokens of a sample without the added special tokens."""
        return self.config.sequence_length - self.num_added

    @property
    def samples_per_epoch(self) -> float | None:
        """Runs of sentences; each run is one sample."""
        return float(len(self._runs))

    def __len__(self) -> int:
        return self.num_samples or len(self._runs)

    def _build_runs(self) -> np.ndarray:
        """Return (first sentence, the one after the last, wanted tokens) of each run, int64 [n, 3].

        A run ends when it has its wanted number of tokens. Sentences at the end of a document that
        are too short for another run join the last run.
        """
        lengths = np.asarray(self.dataset.sequence_lengths, np.int64)
        ends = np.concatenate([[0], np.cumsum(lengths)])
        # Draw for every sentence that may begin a run: equal seeds give equal runs.
        random = np.random.default_rng((self.config.random_seed, self.index_split.value))
        is_short = random.random(len(lengths)) < self.config.short_sequence_probability
        shorter = random.integers(2, max(3, self.longest_text + 1), len(lengths))
        wanted = np.where(is_short, shorter, self.longest_text)
        borders = np.asarray(self.dataset.document_indices)
        runs: list[tuple[int, int, int]] = []
        for document in self.documents:
            first, last = int(borders[document]), int(borders[document + 1])
            begin = first
            while last - begin >= self.min_sentences:
                enough = ends[begin] + wanted[begin]
                end = begin + int(np.searchsorted(ends[begin + 1 : last + 1], enough)) + 1
                end = max(end, begin + self.min_sentences)
                if last - end < self.min_sentences:
                    end = last
                if ends[end] > ends[begin]:
                    runs.append((begin, end, int(wanted[begin])))
                begin = end
        return np.asarray(runs, np.int64).reshape(-1, 3)

    def _read(self, idx: int | None) -> tuple[list[np.ndarray], int, np.random.Generator]:
        """Return the sentences of a sample, its wanted number of tokens, and its generator.

        Raises:
            DataError: a token id outside the vocabulary.
        """
        number = 0 if idx is None else idx
        if not 0 <= number < len(self):
            raise IndexError(f"sample {number} of {len(self)}")
        epoch, position = divmod(number, len(self._runs))
        order = KeyedPermutation(
            len(self._runs), "sentences", self.config.random_seed, self.index_split.value, epoch
        )
        first, last, wanted = self._runs[order[position]].tolist()
        sentences = [np.asarray(self.dataset.get(i), np.int64) for i in range(first, last)]
        for i, sentence in enumerate(sentences, first):
            if len(sentence) and not 0 <= sentence.min() <= sentence.max() < self._vocab_size:
                found = f"an id in sentence {i} of {self.dataset_path}"
                raise outside_vocabulary(found, self._vocab_size)
        key = (self.config.random_seed, self.index_split.value, number)
        return sentences, wanted, np.random.default_rng(key)

    def _choose_spans(
        self, ids: np.ndarray, random: np.random.Generator, hideable: np.ndarray | None = None
    ) -> list[tuple[int, int]]:
        """Return runs of tokens [first, last) to hide, in order; no two overlap.

        Args:
            ids: [n] tokens of the text.
            hideable: bool [n], False where a token is never hidden.
        """
        config = self.config
        may = np.ones(len(ids), bool) if hideable is None else hideable
        begins = np.ones(len(ids), bool)
        if config.masking_do_full_word:
            begins = ~self._continues_word[ids]
        # A token that cannot be hidden ends a word, and a new word begins after it.
        begins |= ~may | ~np.concatenate([[False], may[:-1]])
        starts = np.flatnonzero(begins)
        words = [
            (int(a), int(b)) for a, b in zip(starts, [*starts[1:], len(ids)], strict=True) if may[a]
        ]
        left = max(1, round(int(may.sum()) * config.masking_probability))
        is_taken = np.zeros(len(ids) + 1, bool)
        spans = []
        for place in random.permutation(len(words)).tolist():
            if left <= 0:
                break
            longest = self._draw_length(random, len(words) - place)
            first = words[place][0]
            for count in range(longest, 0, -1):
                last = words[place + count - 1][1]
                joined = all(
                    words[i][1] == words[i + 1][0] for i in range(place, place + count - 1)
                )
                if joined and last - first <= left and not is_taken[first:last].any():
                    is_taken[first:last] = True
                    left -= last - first
                    spans.append((first, last))
                    break
        return sorted(spans)

    def _draw_length(self, random: np.random.Generator, limit: int) -> int:
        """Draw how many words a run has, at most `limit`."""
        longest = self.config.masking_max_ngram
        if self.config.masking_use_geometric_distribution:
            return min(int(random.geometric(GEOMETRIC_SUCCESS)), longest, limit)
        sizes = np.arange(1, longest + 1, dtype=np.float64)
        weights = sizes if self.config.masking_use_longer_ngrams else 1.0 / sizes
        return min(int(random.choice(longest, p=weights / weights.sum())) + 1, limit)


def continues_word(tokenizer: Any, vocab_size: int) -> np.ndarray:
    """Return bool [v], True for tokens that continue the word of the token before them.

    WordPiece marks them with "##". SentencePiece and byte-level BPE mark tokens that begin a word;
    all other tokens continue a word. Without any mark each token is a word.
    """
    found = np.zeros(vocab_size, bool)
    try:
        texts = tokenizer.inv_vocab
    except (AttributeError, NotImplementedError):
        return found
    pieces = [number for number, text in texts.items() if text.startswith("##")]
    if not pieces and any(text.startswith(_BEGIN_MARKS) for text in texts.values()):
        pieces = [number for number, text in texts.items() if not text.startswith(_BEGIN_MARKS)]
    found[[number for number in pieces if number < vocab_size]] = True
    return found


def padded(values: Sequence[int] | np.ndarray, length: int, filler: int) -> np.ndarray:
    """Return int64 [length], the values and then the filler."""
    made = np.full(length, filler, np.int64)
    made[: len(values)] = values
    return made
