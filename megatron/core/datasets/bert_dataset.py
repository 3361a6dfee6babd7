"""Samples of BERT: two pieces of text, in order or not, with words hidden.

J. Devlin et al., "BERT", section 3.1, arXiv 1810.04805. The model predicts whether the pieces are
in order, instead of the next sentence: Z. Lan et al., "ALBERT", section 3.1, arXiv 1909.11942.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from megatron.core.datasets.masked_dataset import (
    MaskedWordPieceDataset,
    MaskedWordPieceDatasetConfig,
    padded,
)

MASKED_SHARE, KEPT_SHARE = 0.8, 0.1
"""Shares of hidden tokens that become [MASK] and that stay; the others become a random token of the
vocabulary (BERT, section 3.1)."""


@dataclass(kw_only=True)
class BERTMaskedWordPieceDatasetConfig(MaskedWordPieceDatasetConfig):
    """Settings of `BERTMaskedWordPieceDataset`, under Megatron's names."""

    classification_head: bool = True
    """Make samples of two pieces, which are swapped in half of the samples."""


class BERTMaskedWordPieceDataset(MaskedWordPieceDataset):
    """[CLS] piece [SEP] piece [SEP], or [CLS] text [SEP], with words hidden.

    A text that is too long is cut at the beginning or the end of its longer piece.

    Args: as of `MegatronDataset`.
    Raises:
        DataError: the tokenizer has no [CLS], [SEP], [MASK] or [PAD].
    """

    config: BERTMaskedWordPieceDatasetConfig

    def __init__(self, *args: object, **named: object) -> None:
        config = named.get("config", args[-1])
        assert isinstance(config, BERTMaskedWordPieceDatasetConfig)
        self.min_sentences = 2 if config.classification_head else 1
        self.num_added = 3 if config.classification_head else 2
        names = ("cls", "sep", "mask", "pad")
        self._cls, self._sep, self._mask, self._pad = (
            int(config.tokenizer.special_id(name, purpose="BERT")) for name in names
        )
        super().__init__(*args, **named)  # type: ignore[arg-type]

    @staticmethod
    def _key_config_attributes() -> list[str]:
        return [*MaskedWordPieceDataset._key_config_attributes(), "classification_head"]

    def __getitem__(self, idx: int | None) -> dict[str, Tensor | int]:
        """Return one sample.

        Args:
            idx: sample number in shuffled order; None gives one without loss, to fill a batch.
        Returns:
            text and types, int64 [s]; labels, int64 [s], the hidden tokens and 0 elsewhere;
            loss_mask, int64 [s], 1 where a token is hidden; padding_mask, int64 [s], 1 where there
            is a token; is_random, 1 if the pieces are swapped; truncated, 1 if the text was cut.
        """
        sentences, wanted, random = self._read(idx)
        pieces = [sentences]
        if self.config.classification_head:
            border = int(random.integers(1, len(sentences)))
            pieces = [sentences[:border], sentences[border:]]
        texts = [np.concatenate(piece) for piece in pieces]
        is_random = len(texts) == 2 and random.random() < 0.5
        if is_random:
            texts.reverse()
        is_cut = cut_to_length(texts, wanted, random)
        ids = np.concatenate([[self._cls], *(part for t in texts for part in (t, [self._sep]))])
        ids = ids.astype(np.int64)
        types = np.repeat([0, 1][: len(texts)], [len(text) + 1 for text in texts])
        types = np.concatenate([[0], types])
        spans = self._choose_spans(ids, random, (ids != self._cls) & (ids != self._sep))
        hidden = np.concatenate([np.arange(a, b) for a, b in spans] or [np.empty(0, np.int64)])
        size, count = self.config.sequence_length, len(ids)
        labels = np.zeros(size, np.int64)
        labels[hidden] = ids[hidden]
        loss_mask = np.zeros(size, np.int64)
        loss_mask[hidden] = idx is not None
        shown = self._shown(ids, hidden, random)
        arrays = {
            "text": padded(shown, size, self._pad),
            "types": padded(types, size, 0),
            "labels": labels,
            "loss_mask": loss_mask,
            "padding_mask": padded(np.ones(count, np.int64), size, 0),
        }
        sample: dict[str, Tensor | int] = {n: torch.from_numpy(a) for n, a in arrays.items()}
        return sample | {"is_random": int(is_random), "truncated": int(is_cut)}

    def _shown(
        self, ids: np.ndarray, hidden: np.ndarray, random: np.random.Generator
    ) -> np.ndarray:
        """Return the tokens [n] that the model reads."""
        draws = random.random(len(hidden))
        others = random.integers(0, self._vocab_size, len(hidden))
        shown = ids.copy()
        kept = np.where(draws < MASKED_SHARE + KEPT_SHARE, ids[hidden], others)
        shown[hidden] = np.where(draws < MASKED_SHARE, self._mask, kept)
        return shown


def cut_to_length(texts: list[np.ndarray], length: int, random: np.random.Generator) -> bool:
    """Cut tokens off the longer text's beginning or end until all texts together have `length`.

    Every text keeps at least one token.

    Returns:
        whether any token was cut.
    """
    left = sum(map(len, texts)) - max(length, len(texts))
    is_cut = left > 0
    while left > 0:
        longest = max(range(len(texts)), key=lambda i: len(texts[i]))
        others = [len(text) for i, text in enumerate(texts) if i != longest]
        # As many as make it no longer than the other one, and then one by one in turn.
        count = min(left, max(1, len(texts[longest]) - max(others, default=0)))
        front = int(random.binomial(count, 0.5))
        texts[longest] = texts[longest][front : len(texts[longest]) - (count - front)]
        left -= count
    return is_cut
