"""Samples for a language model: a fixed number of tokens and the tokens that follow them.

Shapes: s = sequence length. Items are made on the CPU, one at a time, in loader workers.
"""

from __future__ import annotations

import functools
import logging
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from megatron.core.datasets.blended_megatron_dataset_config import BlendedMegatronDatasetConfig
from megatron.core.datasets.indexed_dataset import IndexedDataset, get_bin_path
from megatron.core.datasets.megatron_dataset import MegatronDataset, outside_vocabulary
from megatron.core.datasets.mock_tokens import MockTokens, special_id
from megatron.core.datasets.order.index_building import (
    EpochPlan,
    build_document_index,
    build_sample_index,
    build_shuffle_index,
    plan_epochs,
)
from megatron.core.datasets.order.index_cache import Expected
from megatron.core.datasets.order.sample_order import (
    ShuffledDocuments,
    ShuffledWindows,
    TokenStream,
)
from megatron.core.datasets.utils import Split
from megatron.core.foundation.errors import ConfigError, DataError

__all__ = ["GPTDataset", "GPTDatasetConfig", "MockGPTDataset", "MockTokens"]

logger = logging.getLogger(__name__)

_WORTH_KEEPING = 100_000
"""Documents and samples below which building an index (1 ms) costs less than reading a file."""
_NO_PAD = -1
"""Id of padding if the tokenizer has no pad id of its own; never a real token."""


@dataclass(kw_only=True)
class GPTDatasetConfig(BlendedMegatronDatasetConfig):
    """Settings of `GPTDataset`."""

    reset_position_ids: bool | None = None
    """Count positions from 0 again after each end-of-document token."""
    reset_attention_mask: bool | None = None
    """Hide earlier documents from attention (makes a mask, or needs the kernel's mask)."""
    eod_mask_loss: bool | None = None
    """Leave out the loss at input tokens that end a document."""
    create_attention_mask: bool = True
    """Put a [1, s, s] mask into every item; False leaves the causal mask to the kernel."""
    document_starts: bool = False
    """Put the start of each token's document into every item, int32 [s]: a kernel needs it to
    separate documents without an [s, s] mask."""
    drop_last_partial_validation_sequence: bool = True
    """Leave out a last validation sample that is not full; False pads it."""
    add_extra_token_to_sequence: bool = True
    """Read one more token per sample, so that the last position has its label too."""
    allow_ambiguous_pad_tokens: bool = True
    """If the tokenizer's pad id is also its end-of-document or another special id, treat only real
    padding as padding. False treats each such id as padding, as Megatron-LM does by default: then
    every end of a document has no loss and becomes token 0."""
    vocab_size: int | None = None
    """Ids at or above this are refused; None takes the tokenizer's vocabulary size."""

    def __post_init__(self) -> None:
        super().__post_init__()
        problems = []
        if self.tokenizer is None:
            problems.append("tokenizer")
        for name in ("reset_position_ids", "reset_attention_mask", "eod_mask_loss"):
            if getattr(self, name) is None:
                problems.append(name)
        if problems:
            raise ConfigError(
                f"GPTDatasetConfig was made without {', '.join(problems)}.",
                rule="these settings decide the contents of a sample and have no default",
                fix="give a tokenizer and True or False for each of the others",
            )
        made = self.create_attention_mask or self.document_starts
        if self.reset_attention_mask and not made:
            raise ConfigError(
                "attention is to stop at document ends, but no attention mask is made.",
                rule="the ends of documents are passed on as a mask or as document starts",
                flags=["--reset-attention-mask", "--no-create-attention-mask-in-dataloader"],
                fix="remove one of the two",
            )


class GPTDataset(MegatronDataset):
    """Samples of `config.sequence_length` tokens cut from a shuffled stream of documents.

    With `sample_order` "megatron" the order of the documents, the places where samples begin and
    the order of the samples are the arrays of `order.index_building`, kept on disk when there is a
    cache directory. With "native" there are no arrays: see `order.sample_order.ShuffledWindows`.

    Args:
        indexed_dataset: the corpus.
        dataset_path: its prefix; None builds the index in memory.
        indexed_indices: int32 [N], or a range: documents of this split.
        num_samples: samples wanted; None or 0 means one pass over the documents.
        index_split: which split this is.
        config: settings.
    Raises:
        DataError: the split holds no tokens.
    """

    config: GPTDatasetConfig

    def __init__(
        self,
        indexed_dataset: IndexedDataset,
        dataset_path: str | None,
        indexed_indices: np.ndarray | range,
        num_samples: int | None,
        index_split: Split,
        config: GPTDatasetConfig,
    ) -> None:
        super().__init__(
            indexed_dataset, dataset_path, indexed_indices, num_samples, index_split, config
        )
        self._extra_token = int(config.add_extra_token_to_sequence)
        self._vocab_size = config.vocab_size or int(config.tokenizer.vocab_size)
        self._eod = self._find_eod()
        self._pad = self._find_pad()
        resets = config.reset_position_ids or config.reset_attention_mask
        # Without an end-of-document token a sample is one document.
        self._looks_at_documents = self._eod is not None and (resets or config.document_starts)
        if config.sample_order == "megatron":
            arrays = self._build_or_load_indices()
            self.document_index = arrays["document_index"]
            self.sample_index = arrays["sample_index"]
            self.shuffle_index = arrays["shuffle_index"]
        len(self)  # raises for documents that the order cannot be made of

    def order_fingerprint(self) -> dict[str, Any]:
        """Return the inputs of the samples' order: equal fingerprints mean equal samples.

        Paths are not part of it (a corpus may be moved). The number of samples is only part of it
        if it changes the order of earlier samples.
        """
        config = self.config
        identity: dict[str, Any] = {
            "sample_order": config.sample_order,
            "seed": config.random_seed,
            "sequence_length": config.sequence_length,
            "extra_token": self._extra_token,
            "corpus": getattr(self.dataset, "shape_digest", lambda: "")(),
            **self.contents_identity(),
            "documents": self.documents_identity(),
        }
        if config.sample_order == "megatron":
            plan = self._plan
            identity["epochs"] = [plan.num_epochs, plan.separate_final_epoch]
        return identity

    @functools.cached_property
    def _plan(self) -> EpochPlan:
        length = self.config.sequence_length
        return plan_epochs(self._num_tokens(), length, self._extra_token, self.num_samples)

    @property
    def samples_per_epoch(self) -> float | None:
        return self._plan.tokens_per_epoch / self.config.sequence_length

    @functools.cached_property
    def _order(self) -> ShuffledDocuments | ShuffledWindows:
        if self.config.sample_order == "megatron":
            return ShuffledDocuments(
                self.dataset,
                self.document_index,
                self.sample_index,
                self.shuffle_index,
                extra_token=self._extra_token,
                pad=self._pad,
            )
        return ShuffledWindows(
            TokenStream(self.dataset, self._contiguous()),
            sequence_length=self.config.sequence_length,
            extra_token=self._extra_token,
            num_samples=self.num_samples or None,
            keeps_partial=not self._drops_last(),
            seed=self.config.random_seed,
            pad=self._pad,
        )

    def _drops_last(self) -> bool:
        is_validation = self.index_split == Split.valid
        return not is_validation or self.config.drop_last_partial_validation_sequence

    @staticmethod
    def numel_low_level_dataset(low_level_dataset: Any) -> int:
        """Return the number of sequences: GPT preprocessing writes one for each document."""
        return len(low_level_dataset.sequence_lengths)

    @staticmethod
    def build_low_level_dataset(dataset_path: str, config: Any) -> Any:
        return IndexedDataset(
            dataset_path,
            multimodal=False,
            mmap=config.mmap_bin_files,
            object_storage_cache=config.object_storage_cache_path,
        )

    @staticmethod
    def _key_config_attributes() -> list[str]:
        return [
            *MegatronDataset._key_config_attributes(),
            "add_extra_token_to_sequence",
            "drop_last_partial_validation_sequence",
            "sample_order",
        ]

    def __len__(self) -> int:
        return len(self._order)

    def __getitem__(self, idx: int | None) -> dict[str, Tensor]:
        """Return one sample.

        Args:
            idx: sample number in shuffled order; None gives a sample without loss, to fill a batch.
        Returns:
            tokens and labels, int64 [s]; loss_mask, float32 [s]; position_ids, int64 [s]; if
            configured, attention_mask, bool [1, s, s], True where attention is forbidden, and
            document_starts, int32 [s]. Entries that are equal for all samples share one tensor: do
            not write to it.
        Raises:
            DataError: a token id outside the vocabulary.
        """
        text = np.empty(self.config.sequence_length + self._extra_token, np.int64)
        filled, lowest, highest, num_pads = self._order.read(0 if idx is None else idx, text)
        if highest >= self._vocab_size or lowest < 0:
            raise self._outside(0 if idx is None else idx, text[:filled])
        is_plain = filled == len(text) and not num_pads and idx is not None
        if idx is not None and not self._rewrite(idx, text[:filled]):
            is_plain = False
        if filled < len(text):
            text[filled:] = self._pad
        if self._extra_token:
            tokens, labels = text[:-1], text[1:]
        else:
            tokens, labels, is_plain = text, np.append(text[1:], self._pad), False
        sample = {"tokens": torch.from_numpy(tokens), "labels": torch.from_numpy(labels)}
        sample.update(
            self._masks_and_positions(sample["tokens"]) if self._looks_at_documents else self._plain
        )
        if not is_plain or self.config.eod_mask_loss:
            sample["loss_mask"] = self._loss_mask(tokens, labels, counts=idx is not None)
            # Padding needs a valid id for the embedding; it has no loss.
            for name in ("tokens", "labels"):
                sample[name] = sample[name].masked_fill(sample[name] == self._pad, 0)
        return sample

    def _rewrite(self, idx: int, text: np.ndarray) -> bool:
        """Change the ids [n] of a sample in place; return whether all of them count as before."""
        return True

    def _loss_mask(self, tokens: np.ndarray, labels: np.ndarray, *, counts: bool) -> Tensor:
        mask = np.ones(len(tokens), np.float32) if counts else np.zeros(len(tokens), np.float32)
        mask[labels == self._pad] = 0.0
        if self.config.eod_mask_loss and self._eod is not None:
            mask[tokens == self._eod] = 0.0
        return torch.from_numpy(mask)

    def _masks_and_positions(self, tokens: Tensor) -> dict[str, Tensor]:
        """Return `_plain` with masks and positions for the documents in the sample."""
        config = self.config
        plain, made = self._plain, dict(self._plain)
        assert self._eod is not None
        starts = document_starts(tokens, self._eod)
        if config.create_attention_mask and config.reset_attention_mask:
            made["attention_mask"] = attention_mask(starts[None])[0]
        if config.document_starts:
            made["document_starts"] = starts.to(torch.int32)
        if config.reset_position_ids:
            made["position_ids"] = plain["position_ids"] - starts
        return made

    def _outside(self, idx: int, text: np.ndarray) -> DataError:
        # A vocabulary-parallel embedding would turn such an id into a row of zeros, silently.
        at = int(np.flatnonzero((text >= self._vocab_size) | (text < 0))[0])
        document, position = self._order.locate_sample(idx, at)
        where = "the corpus" if self.dataset_path is None else get_bin_path(self.dataset_path)
        found = f"token {int(text[at])} at position {position} of document {document} in {where}"
        return outside_vocabulary(found, self._vocab_size)

    @property
    def _plain(self) -> dict[str, Tensor]:
        config = self.config
        return _shared(config.sequence_length, config.create_attention_mask, config.document_starts)

    def _find_eod(self) -> int | None:
        eod = special_id(self.config.tokenizer, "eod")
        names = ("reset_position_ids", "reset_attention_mask", "eod_mask_loss")
        wanted = [name for name in names if getattr(self.config, name)]
        if eod is None and wanted:
            raise ConfigError(
                f"{type(self.config.tokenizer).__name__} has no end-of-document token, which "
                f"{', '.join(wanted)} needs.",
                rule="the token that ends a document separates the documents in a sample",
                flags=[f"--{name.replace('_', '-')}" for name in wanted],
                fix="use a tokenizer that names its end token, or leave these flags out",
            )
        return eod

    def _find_pad(self) -> int:
        pad = special_id(self.config.tokenizer, "pad")
        if pad is None:
            return _NO_PAD
        others = {special_id(self.config.tokenizer, name) for name in ("eod", "eos", "bos")}
        if pad in others and self.config.allow_ambiguous_pad_tokens:
            logger.info("pad id %d is also another special id: only real padding is masked", pad)
            return _NO_PAD
        return pad

    def _build_or_load_indices(self) -> dict[str, np.ndarray]:
        plan = self._plan
        drop_last = self._drops_last()
        num_samples = plan.num_samples(drop_last=drop_last)
        if plan.num_epochs * len(self.documents) + num_samples < _WORTH_KEEPING:
            return self._build_indices(plan, drop_last)
        directory = self.cache_directory(type(self).__name__)
        cache = self.index_cache(directory, self.index_split.name)
        expected = {
            "document_index": Expected((np.int32,), (plan.num_epochs * len(self.documents),)),
            "sample_index": Expected((np.int32, np.int64), (num_samples + 1, 2)),
            "shuffle_index": Expected((np.uint32, np.int64), (num_samples,)),
        }
        return cache.load_or_build(lambda: self._build_indices(plan, drop_last), expected)

    def _contiguous(self) -> range:
        """Return the documents as a range.

        Raises:
            ConfigError: they are not contiguous.
        """
        if not isinstance(self.documents, range):
            raise ConfigError(
                "the documents of a split are not contiguous.",
                rule="the native order reads a split as one stretch of the token file",
                flags=["--sample-order"],
                fix="--sample-order megatron",
            )
        return self.documents

    def _num_tokens(self) -> int:
        documents, lengths = self.documents, self.dataset.sequence_lengths
        if not isinstance(documents, range):
            return int(lengths[documents].sum(dtype=np.int64))
        if isinstance(self.dataset, IndexedDataset):
            return self.dataset.num_tokens(documents)
        # A plain slice adds up much faster.
        return int(lengths[documents.start : documents.stop].sum(dtype=np.int64))

    def _build_indices(self, plan: EpochPlan, drop_last: bool) -> dict[str, np.ndarray]:
        random = np.random.RandomState(self.config.random_seed)
        # This order of calls is part of the recipe: both shuffles draw from one generator.
        documents = build_document_index(self.documents, plan, random)
        samples = build_sample_index(
            self.dataset.sequence_lengths, documents, plan, drop_last=drop_last
        )
        shuffle = build_shuffle_index(len(samples) - 1, plan, random)
        return {
            "document_index": documents,
            "sample_index": samples,
            "shuffle_index": shuffle,
        }


@functools.lru_cache(maxsize=8)  # one for all corpora of a blend
def _shared(num_tokens: int, with_mask: bool, with_starts: bool) -> dict[str, Tensor]:
    """Return masks and positions of a sample that is treated as one document."""
    positions = torch.arange(num_tokens)
    made = {}
    if with_mask:
        made["attention_mask"] = attention_mask(torch.zeros(1, num_tokens))[0]
    if with_starts:
        made["document_starts"] = torch.zeros(num_tokens, dtype=torch.int32)
    return {**made, "loss_mask": torch.ones(num_tokens), "position_ids": positions}


def document_starts(tokens: Tensor, eod: int) -> Tensor:
    """Return, for each token, where its document begins: int64 [s].

    An end-of-document token belongs to the document it ends.
    """
    starts = torch.zeros_like(tokens)
    ends = torch.nonzero(tokens[:-1].eq(eod)).flatten()
    starts[ends + 1] = ends + 1
    return torch.cummax(starts, 0).values


def attention_mask(starts: Tensor) -> Tensor:
    """Return the whole mask of samples with several documents: bool [b, 1, s, s], True = forbidden.

    Only this function makes [s, s] masks. A training script calls it on the device that uses them:
    the loader, its worker processes and the copy to the device handle [b, s].

    Args:
        starts: [b, s], from `document_starts`.
    """
    positions = torch.arange(starts.shape[-1], device=starts.device)
    ahead = positions[None, :] > positions[:, None]
    return ((starts[:, :, None] != starts[:, None, :]) | ahead).unsqueeze(1)


class MockGPTDataset(GPTDataset):
    """`GPTDataset` over computed documents: for trying a layout without any data."""

    @staticmethod
    def build_low_level_dataset(dataset_path: str | None, config: Any) -> Any:
        return MockTokens(config.tokenizer, config.vocab_size)
