"""Several datasets handed out as one, in fixed proportions."""

from __future__ import annotations

import logging
from collections import OrderedDict
from collections.abc import Sequence
from typing import Any

import numpy as np
from torch.utils.data import Dataset

from megatron.core.datasets.blended_megatron_dataset_config import BlendedMegatronDatasetConfig
from megatron.core.datasets.blends.order import (
    BlendOrder,
    GreedyOrder,
    SpacedOrder,
    stride_of_table,
)
from megatron.core.datasets.blends.sampling import greedy_counts
from megatron.core.datasets.megatron_dataset import MegatronDataset
from megatron.core.datasets.order.index_cache import Described, Expected
from megatron.core.datasets.utils import normalize
from megatron.core.foundation.errors import ConfigError, DataError

logger = logging.getLogger(__name__)

_MAX_DATASETS = 32767
_WORTH_KEEPING = 500_000
"""Samples times datasets below which walking a blend (2 ms) costs less than a file."""


class BlendedDataset(Described, Dataset[dict[str, Any]]):
    """Samples of several datasets, mixed by an order of `blends.order`.

    The order is computed where it is read; no array has an entry for each sample.

    Args:
        datasets: of one class and one split.
        weights: one for each, any scale.
        size: samples; None takes every sample of every dataset once, mixed in proportion.
        config: settings.
    Raises:
        ConfigError: no or too many datasets, or a weight that is not positive.
        DataError: a dataset is too small for its part.
    """

    def __init__(
        self,
        datasets: Sequence[MegatronDataset],
        weights: Sequence[float],
        size: int | None,
        config: BlendedMegatronDatasetConfig,
    ) -> None:
        if not 0 < len(datasets) < _MAX_DATASETS or len(datasets) != len(weights):
            raise ConfigError(
                f"a blend of {len(datasets)} datasets with {len(weights)} weights.",
                rule=f"one weight for each of 1 to {_MAX_DATASETS - 1} datasets",
                flags=["--data-path"],
                fix="merge small corpora with tools/merge_datasets.py",
            )
        if size is not None and size <= 0:
            raise ConfigError(f"a blend of {size} samples.", rule="at least one sample")
        self.datasets = list(datasets)
        self.split = self.datasets[0].index_split
        self.size = size
        self.config = config
        self.weights = self._proportions(weights)
        self.unique_identifiers = self._identify()
        self._length = sum(map(len, self.datasets)) if size is None else size
        self._table = self._load_or_walk()
        self._order = self._make_order()
        self._check_sizes()

    def __getstate__(self) -> dict[str, Any]:
        return {**super().__getstate__(), "_order": None}

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        self._order = self._make_order()

    def __len__(self) -> int:
        return self._length

    def __getitem__(self, idx: int | None) -> dict[str, Any]:
        """Return sample `idx` of the blend, with its `dataset_id`; None as in the datasets."""
        dataset_id, number = self._order[0 if idx is None else idx]
        inner = None if idx is None else number
        return {"dataset_id": dataset_id, **self.datasets[dataset_id][inner]}  # type: ignore[index]

    def num_tokens(self, idx: int) -> int:
        """Return how many tokens sample `idx` has before it is filled up."""
        dataset_id, number = self._order[idx]
        return self.datasets[dataset_id].num_tokens(number)

    def without_padding(self, idx: int) -> dict[str, Any]:
        """Return sample `idx` as it is before it is filled up."""
        dataset_id, number = self._order[idx]
        return self.datasets[dataset_id].without_padding(number)

    def order_identity(self) -> dict[str, Any]:
        """Return what the order of the samples follows from, see `GPTDataset.order_identity`."""
        identity: dict[str, Any] = {
            "weights": self.weights,
            "members": [dataset.order_identity() for dataset in self.datasets],
        }
        if self.size is None:
            identity["samples"] = self._length
        return identity

    def samples_of_datasets(self) -> list[int]:
        """Return how many samples each dataset gives in all."""
        return self._order.totals()

    @property
    def dataset_index(self) -> np.ndarray:
        """int16 [len], the dataset of every sample; made anew each time, for inspection."""
        return self._order.arrays()[0]

    @property
    def dataset_sample_index(self) -> np.ndarray:
        """int64 [len], the number of every sample within its dataset; made anew each time."""
        return self._order.arrays()[1]

    def _make_order(self) -> BlendOrder:
        weights = np.array(self.weights)
        if self._table is None:
            return SpacedOrder(weights, self._length)
        return GreedyOrder(weights, self._length, capacities=self._capacities(), table=self._table)

    def _capacities(self) -> np.ndarray | None:
        if self.size is not None:
            return None
        return np.array([len(dataset) for dataset in self.datasets])

    def _load_or_walk(self) -> np.ndarray | None:
        """Return the table of a greedy order, kept on disk where walking it takes a while."""
        if self.config.sample_order == "native":
            return None
        weights, capacities = np.array(self.weights), self._capacities()

        def walk() -> dict[str, np.ndarray]:
            stride = stride_of_table(len(weights))
            return {"counts": greedy_counts(weights, self._length, stride, capacities=capacities)}

        if self._length * len(weights) < _WORTH_KEEPING:
            return walk()["counts"]
        rows = -(-self._length // stride_of_table(len(weights))) + 1
        expected = {"counts": Expected((np.int64,), (rows, len(weights)))}
        directory = self.datasets[0].cache_directory(type(self).__name__)
        cache = self.index_cache(directory, self.split.name)
        return cache.load_or_build(walk, expected)["counts"]

    def _proportions(self, weights: Sequence[float]) -> list[float]:
        if self.size is not None:
            return normalize(weights)
        lengths = np.array([len(dataset) for dataset in self.datasets], np.float64)
        shares: list[float] = (lengths / float(np.sum(lengths))).tolist()
        return shares

    def _identify(self) -> OrderedDict[str, Any]:
        identifiers: OrderedDict[str, Any] = OrderedDict()
        identifiers["class"] = type(self).__name__
        identifiers["datasets"] = [dataset.unique_identifiers for dataset in self.datasets]
        identifiers["split"] = self.split.name
        identifiers["weights"] = self.weights
        identifiers["size"] = self.size
        identifiers["sample_order"] = self.config.sample_order
        return identifiers

    def _check_sizes(self) -> None:
        for dataset, number in zip(self.datasets, self._order.totals(), strict=True):
            if number > len(dataset):
                raise DataError(
                    f"the blend takes {number} samples of {dataset.dataset_path}, "
                    f"which was built with {len(dataset)}.",
                    rule="each dataset of a blend is built with a small surplus over its weight",
                    flags=["--mid-level-dataset-surplus"],
                    fix=f"--mid-level-dataset-surplus "
                    f"{self.config.mid_level_dataset_surplus + number / len(dataset) - 1:.4f}",
                )
