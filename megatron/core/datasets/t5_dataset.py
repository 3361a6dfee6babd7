"""Samples of T5: a text with hidden spans, and the hidden spans.

C. Raffel et al., "Exploring the Limits of Transfer Learning with a Unified Text-to-Text
Transformer", section 3.1.4, arXiv 1910.10683: each hidden span becomes one sentinel; the decoder
writes every sentinel, followed by the hidden span. Lengths of spans are geometric, as in
Megatron-LM: M. Joshi et al., "SpanBERT", section 3.1, arXiv 1907.10529.
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
from megatron.core.foundation.errors import ConfigError, DataError


@dataclass(kw_only=True)
class T5MaskedWordPieceDatasetConfig(MaskedWordPieceDatasetConfig):
    """Settings of `T5MaskedWordPieceDataset`, under Megatron's names."""

    sequence_length_encoder: int | None = None
    """Tokens that the encoder reads; None is `sequence_length`."""
    sequence_length_decoder: int
    """Tokens that the decoder reads and writes."""
    masking_max_ngram: int = 10
    masking_use_geometric_distribution: bool = True

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.sequence_length_encoder is None:
            self.sequence_length_encoder = self.sequence_length
        if self.sequence_length_encoder != self.sequence_length or self.sequence_length_decoder < 1:
            raise ConfigError(
                f"sequence_length_encoder={self.sequence_length_encoder} and"
                f" sequence_length_decoder={self.sequence_length_decoder}, where sequence_length is"
                f" {self.sequence_length}.",
                rule="the encoder reads a sample of sequence_length tokens, and the decoder one of"
                " at least one",
                flags=["--encoder-seq-length", "--decoder-seq-length"],
                fix="leave sequence_length_encoder out, and give a length for the decoder",
            )


class T5MaskedWordPieceDataset(MaskedWordPieceDataset):
    """A text with sentinels for its hidden spans, and the spans after their sentinels.

    Adjacent spans share a sentinel. The number of spans is limited by the number of sentinels and
    by the decoder's length.

    Args: as of `MegatronDataset`.
    Raises:
        DataError: the tokenizer has no [PAD], begin, end or sentinels.
    """

    config: T5MaskedWordPieceDatasetConfig

    def __init__(self, *args: object, **named: object) -> None:
        config = named.get("config", args[-1])
        assert isinstance(config, T5MaskedWordPieceDatasetConfig)
        names = ("bos", "eos", "pad")
        self._bos, self._eos, self._pad = (
            int(config.tokenizer.special_id(name, purpose="T5")) for name in names
        )
        self._sentinels = list(getattr(config.tokenizer, "additional_special_tokens_ids", []))
        if not self._sentinels:
            raise DataError(
                f"{type(config.tokenizer).__name__} has no sentinels.",
                rule="a sentinel replaces each hidden span",
                flags=["--vocab-extra-ids"],
                fix="use --vocab-extra-ids 100",
            )
        super().__init__(*args, **named)  # type: ignore[arg-type]

    @staticmethod
    def _key_config_attributes() -> list[str]:
        return [
            *MaskedWordPieceDataset._key_config_attributes(),
            "sequence_length_decoder",
        ]

    def __getitem__(self, idx: int | None) -> dict[str, Tensor | int]:
        """Return one sample.

        Args:
            idx: sample number in shuffled order; None gives one without loss, to fill a batch.
        Returns:
            text_enc, int64 [s] of the encoder; text_dec and labels, int64 [t] of the decoder, the
            second one token ahead; loss_mask, int64 [t], 1 where there is a label; enc_mask [s]
            and dec_mask [t], int64, 1 where there is a token; truncated, 1 if the text was cut.
        """
        sentences, wanted, random = self._read(idx)
        text = np.concatenate(sentences)
        is_cut = len(text) > wanted
        text = text[:wanted]
        shown, hidden = self._corrupt(text, random)
        size, target = self.config.sequence_length, self.config.sequence_length_decoder
        labels = np.append(hidden, self._eos)
        count = len(labels) * (idx is not None)
        arrays = {
            "text_enc": padded(shown, size, self._pad),
            "text_dec": padded(np.append(self._bos, hidden), target, self._pad),
            "labels": padded(labels, target, 0),
            "loss_mask": padded(np.ones(count, np.int64), target, 0),
            "enc_mask": padded(np.ones(len(shown), np.int64), size, 0),
            "dec_mask": padded(np.ones(len(labels), np.int64), target, 0),
        }
        sample: dict[str, Tensor | int] = {n: torch.from_numpy(a) for n, a in arrays.items()}
        return sample | {"truncated": int(is_cut)}

    def _corrupt(
        self, text: np.ndarray, random: np.random.Generator
    ) -> tuple[np.ndarray, np.ndarray]:
        """Return the text [n] with sentinels, and the sentinels with the spans they replace."""
        left = self.config.sequence_length_decoder - 1  # for the end, or the begin
        shown, hidden, begin = [], [], 0
        sentinels = iter(self._sentinels)
        for first, last in _joined(self._choose_spans(text, random)):
            sentinel = next(sentinels, None)
            if sentinel is None or last - first + 1 > left:
                break
            left -= last - first + 1
            shown += [*text[begin:first], sentinel]
            hidden += [sentinel, *text[first:last]]
            begin = last
        shown += [*text[begin:]]
        return np.array(shown, np.int64), np.array(hidden, np.int64)


def _joined(spans: list[tuple[int, int]]) -> list[tuple[int, int]]:
    """Return spans [first, last), with adjacent spans joined."""
    made: list[tuple[int, int]] = []
    for first, last in spans:
        if made and made[-1][1] == first:
            made[-1] = (made[-1][0], last)
        else:
            made.append((first, last))
    return made
