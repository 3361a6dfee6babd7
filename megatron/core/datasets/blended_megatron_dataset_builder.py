"""From paths and weights to the train, valid and test datasets."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
from torch.utils.data import Dataset

from megatron.core.datasets.blended_dataset import BlendedDataset
from megatron.core.datasets.blended_megatron_dataset_config import (
    BlendedMegatronDatasetConfig,
    SplitMatrix,
)
from megatron.core.datasets.megatron_dataset import MegatronDataset
from megatron.core.datasets.order.blend_order import SpacedOrder
from megatron.core.datasets.order.index_building import (
    sizes_of_blend,
    split_bounds,
)
from megatron.core.datasets.utils import Blend, Split, normalize
from megatron.core.foundation.errors import ConfigError, DataError

logger = logging.getLogger(__name__)

Part = Dataset[dict[str, Any]] | list[Dataset[dict[str, Any]]] | None
"""One of train, valid and test: a dataset, several for separate validation, or none."""


class BlendedMegatronDatasetBuilder:
    """Build the datasets of all three splits.

    Every process builds for itself, without any collective: the index arrays are made once for
    each cache directory, and all other processes map them (see `order.index_cache`).

    Args:
        cls: class of the datasets.
        sizes: samples of train, valid and test; None means all samples, 0 skips the split.
        is_built_on_rank: whether this process needs the datasets.
        config: settings.
    """

    def __init__(
        self,
        cls: type[MegatronDataset],
        sizes: Sequence[int | None],
        is_built_on_rank: Callable[[], bool],
        config: BlendedMegatronDatasetConfig,
    ) -> None:
        if len(sizes) != len(Split) or any(size is not None and size < 0 for size in sizes):
            raise ConfigError(
                f"sizes {list(sizes)} were given for train, valid and test.",
                rule="three entries, each a number of samples or None",
            )
        self.cls = cls
        self.sizes = list(sizes)
        self.is_built_on_rank = is_built_on_rank
        self.config = config

    def build(self) -> list[Part]:
        """Return train, valid and test; None for a split that is not built.

        Raises:
            DataError: a corpus is missing or damaged, or a wanted split is empty.
        """
        if not self.is_built_on_rank():
            return [None, None, None]
        if self.config.mock:
            assert self.config.split_matrix is not None
            return [*self._splits_of_corpus(None, self.config.split_matrix, self.sizes)]
        if self.config.blend is not None:
            assert self.config.split_matrix is not None
            return [*self._blended(self.config.blend, self.config.split_matrix, self.sizes)]
        assert self.config.blend_per_split is not None
        parts: list[Part] = []
        for split, blend in zip(Split, self.config.blend_per_split, strict=True):
            parts.append(None if blend is None else self._one_split(split, blend))
        return parts

    def _one_split(self, split: Split, blend: Blend) -> Part:
        whole: SplitMatrix = [None, None, None]
        whole[split.value] = (0.0, 1.0)
        sizes: list[int | None] = [0, 0, 0]
        sizes[split.value] = self.sizes[split.value]
        if split is Split.valid and self.config.multiple_validation_sets:
            prefixes, weights = blend
            if weights is not None:
                raise ConfigError(
                    "weights were given for validation sets that are evaluated one by one.",
                    rule="only a blend has weights",
                    flags=["--valid-data-path", "--multiple-validation-sets"],
                    fix="leave the weights out",
                )
            each = [self._blended(([prefix], None), whole, sizes) for prefix in prefixes]
            return [parts[split.value] for parts in each]
        return self._blended(blend, whole, sizes)[split.value]

    def _blended(
        self, blend: Blend, shares: SplitMatrix, sizes: Sequence[int | None]
    ) -> list[Dataset[dict[str, Any]] | None]:
        """Build all splits of one blend."""
        prefixes, weights = blend
        if len(prefixes) == 1 and weights is None:
            return [*self._splits_of_corpus(prefixes[0], shares, sizes)]
        built_sizes = [self._sizes_of_members(weights, size, len(prefixes)) for size in sizes]
        members = self._all_corpora(prefixes, shares, list(zip(*built_sizes, strict=True)))
        parts: list[Dataset[dict[str, Any]] | None] = []
        for split, size in zip(Split, sizes, strict=True):
            datasets = [of_corpus[split.value] for of_corpus in members]
            parts.append(self._blend_of(datasets, weights, size))
        return parts

    def _sizes_of_members(
        self, weights: Sequence[float] | None, size: int | None, count: int
    ) -> list[int | None]:
        """Return the number of samples of each dataset; None for one pass over its documents."""
        if size == 0:
            return [0] * count
        if weights is None or size is None:
            return [None] * count
        if self.config.sample_order == "native":
            # Datasets without a sample in a short blend are opened too.
            totals = SpacedOrder(np.array(normalize(weights)), size).totals()
            return [max(1, total) for total in totals]
        surplus = self.config.mid_level_dataset_surplus
        return [*sizes_of_blend(normalize(weights), size, surplus)]

    def _blend_of(
        self,
        datasets: Sequence[MegatronDataset | None],
        weights: Sequence[float] | None,
        size: int | None,
    ) -> BlendedDataset | None:
        present = [dataset for dataset in datasets if dataset is not None]
        if not present:
            return None
        if size is not None and weights is not None:
            if self.config.sample_order == "megatron":
                size = sum(sizes_of_blend(normalize(weights), size))
            return BlendedDataset(present, weights, size, self.config)
        lengths = [len(dataset) for dataset in present]
        if size is not None:
            size = min(size, sum(lengths))
        return BlendedDataset(present, lengths, size, self.config)

    def _all_corpora(
        self,
        prefixes: Sequence[str],
        shares: SplitMatrix,
        sizes: Sequence[Sequence[int | None]],
    ) -> list[list[MegatronDataset | None]]:
        rank, num_builders = self.config.builder
        count = len(prefixes)
        first = count * rank // num_builders
        turn = [*range(first, count), *range(first)]

        def build(number: int) -> list[MegatronDataset | None]:
            return self._splits_of_corpus(prefixes[number], shares, sizes[number])

        threads = min(self.config.num_dataset_builder_threads, count)
        if threads <= 1:
            built = dict(zip(turn, map(build, turn), strict=True))
        else:
            with ThreadPoolExecutor(max_workers=threads) as pool:
                built = dict(zip(turn, pool.map(build, turn), strict=True))
        return [built[number] for number in range(count)]

    def _splits_of_corpus(
        self, prefix: str | None, shares: SplitMatrix, sizes: Sequence[int | None]
    ) -> list[MegatronDataset | None]:
        """Open one corpus and build its splits."""
        corpus = self.cls.build_low_level_dataset(prefix, self.config)  # type: ignore[arg-type]
        count = self.cls.numel_low_level_dataset(corpus)
        built: list[MegatronDataset | None] = []
        for split, share, size in zip(Split, shares, sizes, strict=True):
            if share is None or size == 0:
                built.append(None)
                continue
            documents = split_bounds(share, count)
            if len(documents) == 0:
                raise self._empty_split(split, prefix, count)
            built.append(self.cls(corpus, prefix, documents, size, split, self.config))
        return built

    def _empty_split(self, split: Split, prefix: str | None, count: int) -> DataError:
        if not count:
            return DataError(
                f"the corpus {prefix} is empty: it holds no documents.",
                rule="a corpus holds at least one document",
                flags=["--data-path"],
                fix="write it again with tools/preprocess_data.py from a file that is not empty",
            )
        return DataError(
            f"the {split.name} part of {prefix} holds none of its {count} documents.",
            rule="a document belongs to one part; shares are rounded to whole documents",
            flags=["--split", "--eval-iters"],
            fix=("use --eval-iters 0 to train without it, " if split is not Split.train else "")
            + f"give {split.name} a larger share than --split {self.config.split} does, or name"
            " data for each part with --train-data-path, --valid-data-path and --test-data-path",
        )
