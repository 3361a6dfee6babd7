"""Samples whose documents are cut into three parts and joined in another order.

M. Bavarian et al., "Efficient Training of Language Models to Fill in the Middle", sections 3 and
4.2, arXiv 2207.14255: the variant at context level, which cuts a sample after it was read; each
part of a document keeps its length. `preprocessing.transforms` is the variant at document level,
applied once when text is tokenized.

Every draw is keyed by the seed, the split and the number of the sample: it depends neither on the
layout nor on earlier reads.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from torch import Tensor

from megatron.core.datasets.gpt_dataset import GPTDataset, GPTDatasetConfig
from megatron.core.foundation.errors import ConfigError

_OF_TOKENIZER = {"pad": "pad", "eod": "eod"}
"""Tokens for which the tokenizer's own are used if its vocabulary has none of the given name."""


@dataclass(kw_only=True)
class GPTFIMDatasetConfig(GPTDatasetConfig):
    """Settings of `GPTFIMDataset`, under Megatron's names."""

    fim_rate: float = 0.5
    """Probability that a document in a sample is cut."""
    fim_spm_rate: float = 0.5
    """Share of cut documents that begin with the suffix (SPM), not with the prefix (PSM)."""
    fim_extra_tokens: Mapping[str, str] = field(default_factory=dict)
    """Text of the tokens "prefix", "middle", "suffix", "pad" and "eod"."""
    fim_split_sample: str | None = None
    """Token that separates files inside a document; each file is cut separately."""
    fim_fragment_rate: float | None = None
    """Probability that such a file is cut, in a document that was chosen; None is `fim_rate`."""
    fim_no_prefix: str | None = None
    """A text with this beginning is not cut."""

    def __post_init__(self) -> None:
        super().__post_init__()
        for name in ("fim_rate", "fim_spm_rate", "fim_fragment_rate"):
            value = getattr(self, name)
            if value is not None and not 0.0 <= value <= 1.0:
                flag = "--" + name.replace("_", "-")
                raise ConfigError(
                    f"{name}={value}.",
                    rule="it is a probability, between 0 and 1",
                    flags=[flag],
                    fix=f"use {flag} 0.5",
                )


class GPTFIMDataset(GPTDataset):
    """`GPTDataset` that cuts documents into three parts, with a probability.

    If a document is too long with the three new tokens, the end of its suffix is cut off; if the
    suffix is too short for that, the document is not changed. Padding after a suffix has no loss.

    Raises:
        ConfigError: the tokenizer lacks one of the tokens.
    """

    config: GPTFIMDatasetConfig

    def __init__(self, *args: Any, **named: Any) -> None:
        super().__init__(*args, **named)
        self._ids = {name: self._token(name) for name in ("prefix", "middle", "suffix")}
        self._end, self._filler = self._token("eod"), self._token("pad")
        separator = self.config.fim_split_sample
        self._separator = None if separator is None else self._id_of(separator, "split-sample")

    def order_fingerprint(self) -> dict[str, Any]:
        """Return also the inputs of the cuts."""
        config = self.config
        return {
            **super().order_fingerprint(),
            "fill_in_middle": {
                "rates": [config.fim_rate, config.fim_spm_rate, config.fim_fragment_rate],
                "tokens": [*self._ids.values(), self._end, self._filler, self._separator],
                "no_prefix": config.fim_no_prefix,
            },
        }

    def _token(self, name: str) -> int:
        text = self.config.fim_extra_tokens.get(name, "")
        own = _OF_TOKENIZER.get(name)
        if text not in self.config.tokenizer.vocab and own is not None:
            found = getattr(self.config.tokenizer, own, None)
            # A filler is required even if no suffix is ever padded.
            return int(found if found is not None else self._ids["middle"])
        return self._id_of(text, f"{name}-token")

    def _id_of(self, text: str, kind: str) -> int:
        number = self.config.tokenizer.vocab.get(text)
        if number is None:
            raise ConfigError(
                f"{type(self.config.tokenizer).__name__} has no token {text!r}.",
                rule="documents are cut and marked by tokens of the vocabulary",
                flags=["--fim-data", f"--fim-{kind}"],
                fix=f"name a token of the vocabulary: --fim-{kind} TOKEN",
            )
        return int(number)

    def _rewrite(self, idx: int, text: np.ndarray) -> bool:
        """Cut the documents in a sample [n], in place."""
        random = np.random.default_rng((self.config.random_seed, self.index_split.value, idx))
        for document in _between(text, self._end):
            if random.random() >= self.config.fim_rate:
                continue
            if self._separator is None or not (document == self._separator).any():
                self._cut(document, random)
                continue
            rate = self.config.fim_fragment_rate
            rate = self.config.fim_rate if rate is None else rate
            for fragment in _between(document, self._separator):
                if random.random() < rate:
                    self._cut(fragment, random)
        return False

    def _cut(self, ids: np.ndarray, random: np.random.Generator) -> None:
        """Reorder the parts of a text [n] in place."""
        tokenizer, config = self.config.tokenizer, self.config
        before, _ = tokenizer.around_a_text
        if before and tuple(ids[: len(before)]) == before:
            ids = ids[len(before) :]
        text = tokenizer.detokenize(ids.tolist())
        if config.fim_no_prefix is not None and text.startswith(config.fim_no_prefix):
            return
        first, second = sorted(random.integers(0, len(text) + 1, 2).tolist())
        is_spm = random.random() < config.fim_spm_rate
        prefix, middle, suffix = (
            self.config.tokenizer.tokenize_part(part)
            for part in (text[:first], text[first:second], text[second:])
        )
        left = len(ids) - len(prefix) - len(middle) - len(self._ids)
        if left < 0:
            return
        suffix = suffix[:left] + [self._filler] * (left - len(suffix))
        marks = self._ids
        if is_spm:
            order = [marks["prefix"], marks["suffix"], *suffix, marks["middle"], *prefix, *middle]
        else:
            order = [marks["prefix"], *prefix, marks["suffix"], *suffix, marks["middle"], *middle]
        ids[:] = order

    def _loss_mask(self, tokens: np.ndarray, labels: np.ndarray, *, counts: bool) -> Tensor:
        mask = super()._loss_mask(tokens, labels, counts=counts)
        if self._filler not in (self._end, *self._ids.values()):
            mask[labels == self._filler] = 0.0
        return mask


def _between(ids: np.ndarray, separator: int) -> Iterator[np.ndarray]:
    """Yield views of the parts of [n] between separators, without empty ones."""
    begin = 0
    for end in [*np.flatnonzero(ids == separator).tolist(), len(ids)]:
        if end > begin:
            yield ids[begin:end]
        begin = end + 1
