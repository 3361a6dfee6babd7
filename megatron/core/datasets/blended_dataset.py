"""Several datasets mixed into one, in fixed proportions."""

from __future__ import annotations

import functools
import os
from collections import OrderedDict
from collections.abc import Iterator, Sequence, Sized
from dataclasses import dataclass
from typing import Any

import numpy as np
from torch.utils.data import Dataset

from megatron.core.datasets.blended_megatron_dataset_config import BlendedMegatronDatasetConfig
from megatron.core.datasets.megatron_dataset import MegatronDataset
from megatron.core.datasets.order.blend_order import (
    GreedyOrder,
    SpacedOrder,
    greedy_counts,
    stride_of_table,
)
from megatron.core.datasets.order.index_cache import Expected, Fingerprinted
from megatron.core.datasets.utils import normalize
from megatron.core.foundation.errors import ConfigError, DataError

_MAX_DATASETS = 32767
_WORTH_KEEPING = 500_000
"""Samples times datasets below which walking a blend (2 ms) costs less than a file."""


class BlendedDataset(Fingerprinted, Dataset[dict[str, Any]]):
    """Samples of several datasets, mixed by an order of `order.blend_order`.

    The order is computed when it is read; no array has an entry for each sample.

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
        self._check_sizes()

    def __len__(self) -> int:
        return self._length

    def __getitem__(self, idx: int | None) -> dict[str, Any]:
        """Return sample `idx` of the blend, with its `dataset_id`; None as in the datasets."""
        dataset_id, number = self._order[0 if idx is None else idx]
        inner = None if idx is None else number
        return {"dataset_id": dataset_id, **self.datasets[dataset_id][inner]}  # type: ignore[index]

    def num_tokens(self, idx: int) -> int:
        dataset_id, number = self._order[idx]
        return self.datasets[dataset_id].num_tokens(number)

    def without_padding(self, idx: int) -> dict[str, Any]:
        dataset_id, number = self._order[idx]
        return self.datasets[dataset_id].without_padding(number)

    def order_fingerprint(self) -> dict[str, Any]:
        identity: dict[str, Any] = {
            "weights": self.weights,
            "members": [dataset.order_fingerprint() for dataset in self.datasets],
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

    @functools.cached_property
    def _order(self) -> GreedyOrder | SpacedOrder:
        weights = np.array(self.weights)
        if self._table is None:
            return SpacedOrder(weights, self._length)
        return GreedyOrder(weights, self._length, capacities=self._capacities(), table=self._table)

    def _capacities(self) -> np.ndarray | None:
        if self.size is not None:
            return None
        return np.array([len(dataset) for dataset in self.datasets])

    def _load_or_walk(self) -> np.ndarray | None:
        """Return the table of a greedy order, cached on disk if computing it takes long."""
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


_MAX_LINES = 20


@dataclass(frozen=True, kw_only=True)
class Share:
    """One corpus of a blend."""

    path: str
    asked: float
    """Weight as a part of all weights; without weights, the corpus's part of all samples."""
    num_samples: int
    """Samples that the blend takes from the corpus."""
    realised: float
    """Part of all samples of the blend."""
    num_epochs: float | None
    """Passes over its documents; None if the dataset has no `samples_per_epoch`."""


def shares_of(dataset: Sized) -> list[Share]:
    """Return each corpus's share of a dataset; empty if the dataset has no corpus (mock data)."""
    if isinstance(dataset, BlendedDataset):
        return [
            _share(member, asked, taken, len(dataset))
            for member, asked, taken in zip(
                dataset.datasets, dataset.weights, dataset.samples_of_datasets(), strict=True
            )
        ]
    if getattr(dataset, "dataset_path", None) is None:
        return []
    return [_share(dataset, 1.0, len(dataset), len(dataset))]


def _share(member: Any, asked: float, taken: int, size: int) -> Share:
    epoch = getattr(member, "samples_per_epoch", None)
    return Share(
        path=member.dataset_path or "",
        asked=float(asked),
        num_samples=int(taken),
        realised=taken / max(size, 1),
        num_epochs=taken / epoch if epoch else None,
    )


def lines_of(shares: Sequence[Share], *, max_lines: int = _MAX_LINES) -> Iterator[str]:
    """Yield a table: a heading, and a line for each corpus up to `max_lines`."""
    width = max([6, *(len(os.path.basename(share.path)) for share in shares[:max_lines])])
    yield f"{'corpus':<{width}} {'samples':>14} {'share':>9} {'asked':>9} {'epochs':>9}"
    for share in shares[:max_lines]:
        epochs = "-" if share.num_epochs is None else f"{share.num_epochs:.3f}"
        yield (
            f"{os.path.basename(share.path):<{width}} {share.num_samples:>14,} "
            f"{share.realised:>9.4%} {share.asked:>9.4%} {epochs:>9}"
        )
    if len(shares) > max_lines:
        known = [share.num_epochs for share in shares if share.num_epochs is not None]
        spread = f", {min(known):.3f} to {max(known):.3f} epochs" if known else ""
        off = float(np.max([abs(share.realised - share.asked) for share in shares]))
        yield f"... {len(shares)} corpora{spread}; no share is off by more than {off:.4%}"
