"""The base class of datasets made from a corpus."""

from __future__ import annotations

import os
from abc import ABC, abstractmethod
from collections import OrderedDict
from typing import Any

import numpy as np
from torch.utils.data import Dataset

from megatron.core.datasets.blended_megatron_dataset_config import BlendedMegatronDatasetConfig
from megatron.core.datasets.corpus.object_store import is_url
from megatron.core.datasets.order.index_building import as_range, document_ids
from megatron.core.datasets.order.index_cache import Fingerprinted
from megatron.core.datasets.utils import Split
from megatron.core.foundation.errors import DataError


class MegatronDataset(Fingerprinted, Dataset[dict[str, Any]], ABC):
    """A map from sample number to sample, made from part of a corpus.

    Args:
        dataset: the corpus.
        dataset_path: its prefix; None for a corpus that is not on disk.
        indices: int32 [N], or a range: its documents that belong to this split.
        num_samples: samples wanted; None means one pass over the documents.
        index_split: which split this is.
        config: settings.
    """

    def __init__(
        self,
        dataset: Any,
        dataset_path: str | None,
        indices: np.ndarray | range,
        num_samples: int | None,
        index_split: Split,
        config: BlendedMegatronDatasetConfig,
    ) -> None:
        self.dataset = dataset
        self.dataset_path = dataset_path
        self.documents = as_range(indices)
        self.num_samples = num_samples
        self.index_split = index_split
        self.config = config
        self.unique_identifiers = self._identify()

    @property
    def indices(self) -> np.ndarray:
        """int32 [N], the documents of this split."""
        return document_ids(self.documents)

    def _identify(self) -> OrderedDict[str, Any]:
        """Return everything that the index arrays depend on, in a fixed order."""
        identifiers: OrderedDict[str, Any] = OrderedDict()
        identifiers["class"] = type(self).__name__
        identifiers["dataset_path"] = self.dataset_path
        identifiers["num_samples"] = self.num_samples
        identifiers["index_split"] = self.index_split.name
        for name in self._key_config_attributes():
            identifiers[name] = getattr(self.config, name)
        # A corpus that was rewritten under the same name must not use the old index.
        shape_digest = getattr(self.dataset, "shape_digest", None)
        if shape_digest is not None:
            identifiers["corpus"] = shape_digest()
        return identifiers

    def cache_directory(self, class_name: str) -> str | None:
        """Return the folder of index files: the configured one, or a folder next to the corpus."""
        if self.config.path_to_cache is not None or self.dataset_path is None:
            return self.config.path_to_cache
        beside = self.dataset_path
        if is_url(beside):  # nothing is written to a store
            beside = os.path.join(str(self.config.object_storage_cache_path), "indices")
        return os.path.join(beside, "cache", f"{class_name}_indices")

    def order_fingerprint(self) -> dict[str, Any]:
        """Return the values that determine the order of the samples."""
        return {"described": self.unique_description_hash, **self.contents_identity()}

    def contents_identity(self) -> dict[str, str]:
        """Return a digest of sampled contents of the corpus, if it has files."""
        digest = getattr(self.dataset, "contents_digest", None)
        return {} if digest is None else {"contents": digest()}

    def documents_identity(self) -> list[int]:
        """Return first, last and number of the documents, as plain values."""
        return [int(self.documents[0]), int(self.documents[-1]), len(self.documents)]

    @staticmethod
    def numel_low_level_dataset(low_level_dataset: Any) -> int:
        """Return the number of documents (or sequences) that a split divides."""
        return len(low_level_dataset)

    @staticmethod
    @abstractmethod
    def build_low_level_dataset(dataset_path: str, config: object) -> Any:
        """Open a corpus."""

    @staticmethod
    def _key_config_attributes() -> list[str]:
        """Return the settings that the index arrays depend on."""
        return ["random_seed", "sequence_length", "split", "split_matrix", "tokenizer"]

    @property
    def samples_per_epoch(self) -> float | None:
        """Number of samples, possibly fractional, in one pass over the documents, or None."""
        return None

    def num_tokens(self, idx: int) -> int:
        """Return how many tokens sample `idx` has before it is filled up."""
        return int(self.config.sequence_length)

    def without_padding(self, idx: int) -> dict[str, Any]:
        """Return sample `idx` as it is before it is filled up, entries [num_tokens(idx)]."""
        return self[idx]

    @abstractmethod
    def __len__(self) -> int: ...

    @abstractmethod
    def __getitem__(self, idx: int) -> dict[str, Any]: ...


def outside_vocabulary(found: str, vocab_size: int) -> DataError:
    """Return the error for a token that a vocabulary does not have.

    Args:
        found: the token and its place.
    """
    return DataError(
        f"{found} is outside the vocabulary of {vocab_size}.",
        rule="token ids must be between 0 and the vocabulary size - 1",
        flags=["--data-path", "--tokenizer-type", "--tokenizer-model", "--vocab-size"],
        fix="train with the tokenizer that the corpus was preprocessed with, or preprocess it "
        "again; if the file is damaged, copy it again",
    )
