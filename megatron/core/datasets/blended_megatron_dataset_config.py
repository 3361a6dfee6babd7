"""Settings of datasets: paths, weights, splits, lengths."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from megatron.core.datasets.order.index_building import split_boundaries
from megatron.core.datasets.utils import Blend
from megatron.core.foundation.errors import ConfigError
from megatron.core.settings.field_types import check_types

SAMPLE_ORDERS = ("megatron", "native")
SplitMatrix = list[tuple[float, float] | None]


@dataclass(kw_only=True)
class BlendedMegatronDatasetConfig:
    """Settings of one set of train, valid and test datasets.

    Give `blend` with `split`, or `blend_per_split` without; neither means mock data.
    """

    random_seed: int
    """Seed of all shuffles."""
    sequence_length: int
    """Tokens per sample."""
    blend: Blend | None = None
    """Path prefixes and weights, divided into three by `split`; see `get_blend_from_list`."""
    blend_per_split: Sequence[Blend | None] | None = None
    """The same for train, valid and test, each used whole."""
    split: str | None = None
    """Shares of train, valid and test, for example "99,1,0"; "1,1,1" for mock data without it."""
    split_matrix: SplitMatrix | None = field(init=False, default=None)
    """Derived from `split`: (begin, end) of each part, None for an empty one."""
    multiple_validation_sets: bool = False
    """Build the valid part of `blend_per_split` as a list, one dataset for each prefix."""
    num_dataset_builder_threads: int = 1
    """Corpora opened and indexed at the same time."""
    path_to_cache: str | None = None
    """Directory of the index arrays; None: `<prefix>/cache` next to each corpus."""
    mmap_bin_files: bool = True
    """Map the token files; False reads them with positioned reads."""
    object_storage_cache_path: str | None = None
    """Folder of local copies of corpora that are named by URL."""
    mock: bool = field(init=False, default=False)
    """Derived: no data was named."""
    tokenizer: Any = None
    """Has the end-of-document id, the pad id and the vocabulary size."""
    mid_level_dataset_surplus: float = 0.005
    """Relative surplus of samples in each dataset of a blend: the greedy rule may take a few more
    samples from it than its weight times the size of the blend."""

    builder: tuple[int, int] = (0, 1)
    """Number of this process, and number of processes that build at once. They index a blend
    together: each begins with other corpora, and reads from the cache the indices of the others."""
    sample_order: str = "megatron"
    """"megatron": documents and samples shuffled by index arrays, equal to Megatron-LM's.
    "native": windows of the corpus, and blends that are computed when a sample is read."""

    def __post_init__(self) -> None:
        check_types(self)
        if self.sample_order not in SAMPLE_ORDERS:
            raise ConfigError(
                f"sample_order={self.sample_order!r}.",
                rule=f"one of {', '.join(SAMPLE_ORDERS)}",
                flags=["--sample-order"],
            )
        if self.sequence_length <= 0:
            raise ConfigError(
                f"sequence_length={self.sequence_length}.",
                rule="a sample holds at least one token",
                flags=["--seq-length"],
                fix="--seq-length 1024",
            )
        per_split = self.blend_per_split
        if per_split is not None and any(blend is not None for blend in per_split):
            if self.blend is not None or self.split is not None:
                raise ConfigError(
                    "data was named for all parts together and for each part.",
                    rule="--data-path with --split, or --train-data-path, --valid-data-path and "
                    "--test-data-path without",
                    flags=["--data-path", "--split", "--train-data-path"],
                    fix="remove one of the two",
                )
            if len(per_split) != 3:
                raise ConfigError(
                    f"{len(per_split)} blends were given for train, valid and test.",
                    rule="three entries, None for a part that is not wanted",
                )
            return
        self.blend_per_split = None
        self.mock = self.blend is None
        if self.mock and self.split is None:
            self.split = "1,1,1"
        if self.split is None:
            raise ConfigError(
                "data is named for all parts together, but not how to divide it.",
                rule="one corpus for train, valid and test needs the share of each",
                flags=["--split"],
                fix="--split 99,1,0",
            )
        self.split_matrix = split_boundaries(self.split)
