"""Packs of conversations as samples, with the loss on the tokens of their mask (--sft).

`tools/preprocess_data.py --sft` writes two corpora of the same shape: the tokens, and with the
suffix `_mask` a 1 for every token to be learned. A document is a pack of conversations and becomes
one sample; each conversation is a sequence.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor

from megatron.core.datasets.corpus.files import MASK_SUFFIX
from megatron.core.datasets.gpt_dataset import GPTDatasetConfig, attention_mask
from megatron.core.datasets.indexed_dataset import IndexedDataset
from megatron.core.datasets.megatron_dataset import MegatronDataset, outside_vocabulary
from megatron.core.datasets.order.permutation import KeyedPermutation
from megatron.core.datasets.utils import Split
from megatron.core.foundation.errors import DataError


class Conversations:
    """The tokens and the mask of packed conversations.

    Args:
        path_prefix: prefix of the corpus of tokens.
        options: arguments of `IndexedDataset`, for both corpora.
    Raises:
        DataError: a corpus is missing, or their shapes differ.
    """

    def __init__(self, path_prefix: str, **options: Any) -> None:
        self.tokens = IndexedDataset(path_prefix, **options)
        self.mask = IndexedDataset(path_prefix + MASK_SUFFIX, **options)
        for name in ("sequence_lengths", "document_indices"):
            if not np.array_equal(getattr(self.tokens, name), getattr(self.mask, name)):
                raise DataError(
                    f"{path_prefix} and {path_prefix}{MASK_SUFFIX} differ in their {name}.",
                    rule="the mask marks each token that is learned",
                    flags=["--sft", "--data-path"],
                    fix="write both again with tools/preprocess_data.py --sft",
                )

    def __len__(self) -> int:
        return len(self.tokens.document_indices) - 1

    def shape_digest(self) -> str:
        return f"{self.tokens.shape_digest()} {self.mask.shape_digest()}"

    def contents_digest(self) -> str:
        return f"{self.tokens.contents_digest()} {self.mask.contents_digest()}"


class SFTDataset(MegatronDataset):
    """One pack for each sample, in a keyed order that is new in each epoch.

    Args: as of `GPTDataset`; the corpus is a `Conversations`.
    Raises:
        DataError: a pack is longer than a sample.
    """

    config: GPTDatasetConfig

    def __init__(
        self,
        dataset: Conversations,
        dataset_path: str | None,
        indices: np.ndarray | range,
        num_samples: int | None,
        index_split: Split,
        config: GPTDatasetConfig,
    ) -> None:
        super().__init__(dataset, dataset_path, indices, num_samples, index_split, config)
        self._vocab_size = config.vocab_size or int(config.tokenizer.vocab_size)
        lengths = dataset.tokens.document_lengths()[np.asarray(indices)]
        if int(lengths.max(initial=0)) > config.sequence_length:
            worst = int(np.asarray(indices)[int(lengths.argmax())])
            raise DataError(
                f"document {worst} of {dataset_path} is a pack of {int(lengths.max())} tokens.",
                rule=f"a pack fits into one sample of {config.sequence_length} tokens",
                flags=["--sft", "--seq-length"],
                fix=f"preprocess with --pack-length {config.sequence_length}, or train with a "
                f"longer --seq-length",
            )

    @staticmethod
    def build_low_level_dataset(dataset_path: str, config: Any) -> Conversations:
        return Conversations(
            dataset_path,
            mmap=config.mmap_bin_files,
            object_storage_cache=config.object_storage_cache_path,
        )

    def order_fingerprint(self) -> dict[str, Any]:
        return {
            "sample_order": "packs",
            "seed": self.config.random_seed,
            "corpus": self.dataset.shape_digest(),
            **self.contents_identity(),
            "documents": self.documents_identity(),
        }

    @property
    def samples_per_epoch(self) -> float | None:
        """The number of packs; each is one sample."""
        return float(len(self.documents))

    def __len__(self) -> int:
        return self.num_samples or len(self.documents)

    def __getitem__(self, idx: int | None) -> dict[str, Tensor]:
        """Return one sample; None returns a sample without loss.

        Returns:
            tokens and labels, int64 [s]; loss_mask, float32 [s], 1 where the label is learned and
            belongs to the conversation of its token; position_ids, int64 [s], from 0 in each
            conversation; document_starts, int32 [s]; padding_mask, bool [s], True after the pack;
            attention_mask, bool [1, s, s], if configured.
        Raises:
            DataError: a token id outside the vocabulary.
        """
        sample = self._sample(self.config.sequence_length, 0 if idx is None else idx)
        if idx is None:
            sample["loss_mask"].zero_()
        if self.config.create_attention_mask:
            sample["attention_mask"] = attention_mask(sample["document_starts"][None])[0]
        return sample

    def num_tokens(self, idx: int) -> int:
        document = self._document_of(idx)
        first, last = self.dataset.tokens.document_indices[document : document + 2].tolist()
        return int(self.dataset.tokens.sequence_lengths[first:last].sum())

    def without_padding(self, idx: int) -> dict[str, Tensor]:
        return self._sample(self.num_tokens(idx), idx)

    def _sample(self, size: int, idx: int) -> dict[str, Tensor]:
        """Return pack `idx`, filled up to `size` tokens."""
        document = self._document_of(idx)
        pack = self.dataset.tokens.document_tokens(document).astype(np.int64)
        self._check_ids(pack, document)
        count = len(pack)
        tokens, labels = np.zeros(size, np.int64), np.zeros(size, np.int64)
        tokens[:count], labels[: max(count - 1, 0)] = pack, pack[1:]
        loss_mask = np.zeros(size, np.float32)
        starts = np.full(size, count, np.int32)  # padding is a document of its own
        first, last = self.dataset.tokens.document_indices[document : document + 2].tolist()
        lengths = self.dataset.tokens.sequence_lengths[first:last].astype(np.int64)
        begins = np.cumsum(lengths) - lengths
        starts[:count] = np.repeat(begins, lengths)
        if count:
            loss_mask[: count - 1] = self.dataset.mask.document_tokens(document)[1:]
            loss_mask[begins[begins > 0] - 1] = 0.0  # the label begins the next conversation
        return {
            "tokens": torch.from_numpy(tokens),
            "labels": torch.from_numpy(labels),
            "loss_mask": torch.from_numpy(loss_mask),
            "position_ids": torch.arange(size) - torch.from_numpy(starts),
            "document_starts": torch.from_numpy(starts),
            "padding_mask": torch.arange(size) >= count,
        }

    def _document_of(self, idx: int) -> int:
        if not 0 <= idx < len(self):
            raise IndexError(f"sample {idx} of {len(self)}")
        epoch, position = divmod(idx, len(self.documents))
        order = KeyedPermutation(len(self.documents), "packs", self.config.random_seed, epoch)
        return int(self.documents[order[position]])

    def _check_ids(self, pack: np.ndarray, document: int) -> None:
        wrong = np.flatnonzero((pack < 0) | (pack >= self._vocab_size))
        if len(wrong):
            found = (
                f"token {int(pack[wrong[0]])} at position {int(wrong[0])} of document {document}"
            )
            raise outside_vocabulary(f"{found} in {self.dataset_path}.bin", self._vocab_size)
