"""Datasets and iterators of micro batches for the ranks that read data."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.utils import get_pg_rank, get_pg_size
from megatron.training.resolve import ResolvedRun
from megatron.training.state import TrainState

DatasetProvider = Callable[..., Any]


@dataclass(frozen=True)
class SampleCounts:
    """Samples that the run asks of each split; None is the whole split once."""

    train: int
    valid: int | None
    test: int

    def __iter__(self):
        return iter((self.train, self.valid, self.test))


def sample_counts(run: ResolvedRun) -> SampleCounts:
    """Return how many samples training, all evaluations and the final test consume."""
    train = 0 if run.skip_train else run.train_samples or 0
    num_evaluations = 1 + ((run.train_iters or 0) // run.eval_interval if run.eval_interval else 0)
    size = run.eval_iters * run.global_batch_size
    wants_valid = run.eval_iters > 0 and (run.eval_interval is not None or run.skip_train)
    return SampleCounts(
        train=train,
        valid=None if run.full_validation and wants_valid else num_evaluations * size * wants_valid,
        test=size * wants_valid,
    )


@dataclass
class DataIterators:
    """Iterators of micro batches; None where the split is not read on this rank.

    With several model chunks per rank each is a list with one iterator per chunk.
    """

    train: Any = None
    valid: Any = None
    test: Any = None


def build_data(
    run: ResolvedRun,
    provider: DatasetProvider,
    groups: ProcessGroupCollection,
    state: TrainState,
) -> DataIterators:
    """Build the datasets and open iterators at the place where the run stands.

    Args:
        provider: `provider([train, valid, test])` or `provider(..., vp_stage=...)` returns three
            datasets. With the attribute `is_distributed = True` it is called on every rank and
            decides itself what to build there; otherwise only tensor-parallel rank 0 builds.
    """
    num_chunks = run.virtual_pipeline_model_parallel_size or 1
    per_chunk = [
        _chunk_data(run, provider, groups, state, chunk if num_chunks > 1 else None)
        for chunk in range(num_chunks)
    ]
    if num_chunks == 1:
        return per_chunk[0]
    return DataIterators(
        train=[chunk.train for chunk in per_chunk],
        valid=[chunk.valid for chunk in per_chunk],
        test=[chunk.test for chunk in per_chunk],
    )


def _chunk_data(
    run: ResolvedRun,
    provider: DatasetProvider,
    groups: ProcessGroupCollection,
    state: TrainState,
    vp_stage: int | None,
) -> DataIterators:
    builds_everywhere = getattr(provider, "is_distributed", False)
    if not builds_everywhere and get_pg_rank(groups.tp) != 0:
        return DataIterators()
    options: dict[str, Any] = {}
    if vp_stage is not None and "vp_stage" in inspect.signature(provider).parameters:
        options["vp_stage"] = vp_stage
    train, valid, test = provider(list(sample_counts(run)), **options)
    return DataIterators(
        train=_iterator(run, groups, train, state.consumed_train_samples),
        valid=_iterator(run, groups, valid, state.consumed_valid_samples, repeats=True),
        test=_iterator(run, groups, test, 0, repeats=True),
    )


def _iterator(
    run: ResolvedRun,
    groups: ProcessGroupCollection,
    dataset: Any,
    consumed_samples: int,
    *,
    repeats: bool = False,
) -> Any:
    raise NotImplementedError
