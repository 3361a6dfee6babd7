"""Change a text before it is tokenized: fill in the middle, and cutting it into sentences.

Fill in the middle: "Efficient Training of Language Models to Fill in the Middle" (Bavarian et al.),
section 3, arXiv 2207.14255. With rate r a document is cut at two characters chosen uniformly and
becomes

    PSM   <prefix> prefix <suffix> suffix <middle> middle
    SPM   <prefix> <suffix> suffix <middle> prefix middle

each part tokenized by itself. The draw is keyed by the seed and the text, so a document is cut the
same way in every shard, order and number of workers. No torch import.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from megatron.core.foundation.errors import ConfigError, DataError
from megatron.core.foundation.optional_imports import require

Encode = Callable[[Sequence[str]], tuple[np.ndarray, np.ndarray]]

_KNOWN_NAMES = (
    ("<fim_prefix>", "<fim_middle>", "<fim_suffix>"),
    ("<|fim_prefix|>", "<|fim_middle|>", "<|fim_suffix|>"),
    ("<PRE>", "<MID>", "<SUF>"),
)
"""Usual names of the prefix, middle and suffix tokens."""


@dataclass(frozen=True, kw_only=True)
class FillInMiddle:
    """Cut and reorder documents; picklable.

    Args:
        rate: share of the documents that are cut.
        spm_rate: share of the cut documents in the order SPM; the others are PSM.
        seed: seed of the cuts.
        prefix, middle, suffix: ids of the three tokens.
    """

    rate: float
    spm_rate: float
    seed: int
    prefix: int
    middle: int
    suffix: int

    def __call__(self, texts: Sequence[str], encode: Encode) -> tuple[np.ndarray, np.ndarray]:
        """Return the ids of all texts, and the number of ids of each text."""
        pieces: list[str] = []
        orders: list[list[int | None]] = []  # ids to insert; None takes the next piece
        for text in texts:
            draw = self._draw(text)
            if not text or draw[0] >= self.rate:
                pieces.append(text)
                orders.append([None])
                continue
            first, second = sorted(int(share * (len(text) + 1)) for share in draw[2:])
            prefix, middle, suffix = text[:first], text[first:second], text[second:]
            if draw[1] < self.spm_rate:
                pieces += [suffix, prefix, middle]
                orders.append([self.prefix, self.suffix, None, self.middle, None, None])
            else:
                pieces += [prefix, suffix, middle]
                orders.append([self.prefix, None, self.suffix, None, self.middle, None])
        ids, counts = encode(pieces)
        parts = iter(np.split(ids, np.cumsum(counts)[:-1]) if len(counts) else [])
        arrays, totals = [], []
        for order in orders:
            found = [next(parts) if i is None else np.array([i], ids.dtype) for i in order]
            arrays += found
            totals.append(sum(map(len, found)))
        return np.concatenate(arrays) if arrays else ids, np.array(totals, np.int64)

    def _draw(self, text: str) -> list[float]:
        """Return four numbers in [0, 1) that depend on the seed and the text alone."""
        key = self.seed.to_bytes(8, "little", signed=True)
        digest = hashlib.blake2b(text.encode(), digest_size=32, key=key).digest()
        return [int.from_bytes(digest[i : i + 6], "little") / 2**48 for i in range(0, 32, 8)]


def fill_in_middle(
    vocab: dict[str, int], *, rate: float, spm_rate: float, seed: int, names: Sequence[str] | None
) -> FillInMiddle:
    """Make the transform for a tokenizer.

    Args:
        vocab: token text -> id.
        names: names of the prefix, middle and suffix token; None tries the usual names.
    Raises:
        ConfigError: a rate outside [0, 1], or the tokenizer has no such tokens.
    """
    for flag, value in (("--fim-rate", rate), ("--fim-spm-rate", spm_rate)):
        if not 0 <= value <= 1:
            raise ConfigError(f"{flag} {value}.", rule="a share between 0 and 1", flags=[flag])
    candidates = [tuple(names)] if names else _KNOWN_NAMES
    for three in candidates:
        if all(name in vocab for name in three):
            ids = [vocab[name] for name in three]
            named = dict(zip(("prefix", "middle", "suffix"), ids, strict=True))
            return FillInMiddle(rate=rate, spm_rate=spm_rate, seed=seed, **named)
    tried = ", ".join("/".join(three) for three in candidates)
    raise ConfigError(
        f"the tokenizer has none of {tried}.",
        rule="fill in the middle needs a token before the prefix, the middle and the suffix",
        flags=["--fim-rate", "--fim-tokens"],
        fix="name them: --fim-tokens PREFIX MIDDLE SUFFIX",
    )


class SentenceSplitter:
    """Split texts of one language with NLTK's Punkt model.

    Picklable; each process loads the model on first use.

    Args:
        language: name of NLTK's model, for example "english".
        keep_newlines: keep the white space after a sentence as part of the sentence.
    """

    def __init__(self, language: str, *, keep_newlines: bool = False) -> None:
        self.language = language
        self.keep_newlines = keep_newlines
        self._model: Any = None

    def load(self) -> None:
        """Load the model now, so that a missing one is reported before any work is done.

        Raises:
            MissingExtraError: NLTK is not installed.
            DataError: NLTK has no data for the language.
        """
        punkt = require("nltk.tokenize.punkt", purpose="--split-sentences")
        try:
            self._model = punkt.PunktTokenizer(self.language)
        except LookupError as error:
            raise DataError(
                f"NLTK has no sentence model for {self.language!r} on this machine.",
                rule="the model 'punkt_tab' is data that NLTK downloads",
                flags=["--split-sentences", "--lang"],
                fix="python -m nltk.downloader punkt_tab",
            ) from error

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_model": None}

    def __call__(self, text: str) -> list[str]:
        """Return the sentences of a text, in order."""
        if self._model is None:
            self.load()
        spans = [*self._model.span_tokenize(text)]
        if self.keep_newlines and spans:
            begins = [0, *(begin for begin, _ in spans[1:])]
            spans = [*zip(begins, [*begins[1:], len(text)], strict=True)]
        return [text[begin:end] for begin, end in spans]
