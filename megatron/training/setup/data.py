"""Datasets and iterators of micro batches for the ranks that read data."""

from __future__ import annotations

import functools
import gc
import inspect
import os
from collections.abc import Callable, Generator, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from megatron.core.datasets.blends.report import lines_of, shares_of
from megatron.core.foundation.errors import ConfigError, shown
from megatron.core.foundation.heartbeat.place import PLACE
from megatron.core.num_microbatches_calculator import build_num_microbatches_calculator
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.transport import torch_collectives
from megatron.core.transport.object_collectives import max_across_ranks
from megatron.training.config.phases import phase_of
from megatron.training.config.resolved import ResolvedRun
from megatron.training.datasets.audit import audited
from megatron.training.datasets.loader import build_pretraining_data_loader, collate_in_memory
from megatron.training.datasets.packed_rows import Packing, RankOfPacking
from megatron.training.launch.printing import is_rank_0, print_rank_0
from megatron.training.metrics.flops import training_flops
from megatron.training.metrics.model_size import ModelSize
from megatron.training.run.context import DataIterators, ValidationSet
from megatron.training.run.state import TrainState

DatasetProvider = Callable[..., Any]


@dataclass(frozen=True)
class SampleCounts:
    """Samples that the run asks of each split; None is the whole split once."""

    train: int
    valid: int | None
    test: int

    def __iter__(self) -> Iterator[int | None]:
        return iter((self.train, self.valid, self.test))


def sample_counts(run: ResolvedRun, consumed_samples: int = 0) -> SampleCounts:
    """Return how many samples training, all evaluations and the final test consume.

    Args:
        consumed_samples: tells which phase of the training data it is about.
    """
    phase = phase_of(run, consumed_samples)
    train = 0 if run.schedule.skip_train else phase.end - phase.begin
    num_evaluations = 1 + (
        (run.schedule.train_iters or 0) // run.schedule.eval_interval
        if run.schedule.eval_interval
        else 0
    )
    size = run.schedule.eval_iters * run.schedule.eval_batch[0]
    wants_valid = run.schedule.eval_iters > 0 and (
        run.schedule.eval_interval is not None or run.schedule.skip_train
    )
    return SampleCounts(
        train=train,
        valid=None
        if run.schedule.full_validation and wants_valid
        else num_evaluations * size * wants_valid,
        test=size * wants_valid,
    )


def build_data(
    run: ResolvedRun,
    provider: DatasetProvider,
    groups: ProcessGroupCollection,
    state: TrainState,
) -> DataIterators:
    """Build the datasets and open iterators at the place where the run stands.

    Args:
        provider: `provider([train, valid, test])`, or with a further argument `vp_stage`, returns
            three datasets. With the attribute `is_distributed = True` it is called on every rank
            and decides itself what to build there; otherwise only tensor-parallel rank 0 builds,
            and the forward step is expected to broadcast.
    Raises:
        ConfigError: ranks share rows of samples, and not all of them build the datasets.
    Communication:
        an all-reduce of one number for the count of validation sets, for the length of each, and
        for the length of the test set, over all processes.
    """
    num_chunks = run.parallelism.virtual_pipeline_model_parallel_size or 1
    per_chunk = [
        _chunk_data(run, provider, groups, state, chunk if num_chunks > 1 else None)
        for chunk in range(num_chunks)
    ]
    # Only ranks that read data know how many sets there are, and how long.
    num_sets = max_across_ranks(
        max(len(chunk.valid) for chunk in per_chunk), torch_collectives.world()
    )
    sets = [
        _set_of_chunks([chunk.valid[n] for chunk in per_chunk if n < len(chunk.valid)], num_chunks)
        for n in range(num_sets)
    ]
    for each in sets:
        each.num_rows = max_across_ranks(each.num_rows, torch_collectives.world())
    return DataIterators(
        train=_one_or_list([chunk.train for chunk in per_chunk]),
        train_packing=per_chunk[0].train_packing,
        train_lengths=per_chunk[0].train_lengths,
        valid=sets,
        train_order=next((c.train_order for c in per_chunk if c.train_order is not None), None),
        test=_one_or_list([chunk.test for chunk in per_chunk]),
        test_packing=per_chunk[0].test_packing,
        num_test_rows=max_across_ranks(
            max(chunk.num_test_rows for chunk in per_chunk), torch_collectives.world()
        ),
    )


def _set_of_chunks(found: list[ValidationSet], num_chunks: int) -> ValidationSet:
    """Join what the chunks of this rank read of one validation set, maybe nothing."""
    read: list[Any] = [each.data for each in found] or [None] * num_chunks
    name = next((each.name for each in found if each.name), "")
    packing = found[0].packing if found else None
    num_rows = max((each.num_rows for each in found), default=0)
    return ValidationSet(name, _one_or_list(read), num_rows, packing)


def _one_or_list(iterators: list[Any]) -> Any:
    """Schedules take one iterator for one chunk, and a list for several."""
    return iterators[0] if len(iterators) == 1 else iterators


def _chunk_data(
    run: ResolvedRun,
    provider: DatasetProvider,
    groups: ProcessGroupCollection,
    state: TrainState,
    vp_stage: int | None,
) -> DataIterators:
    builds_everywhere = getattr(provider, "is_distributed", False)
    if run.parallelism.hybrid_context_parallel and not builds_everywhere:
        raise ConfigError(
            "--hybrid-context-parallel with datasets that are built on one tensor-parallel rank.",
            rule="every rank knows the samples of a batch, and so how many micro batches they are",
            flags=["--hybrid-context-parallel"],
            fix="set is_distributed = True on the datasets provider, and build them on every rank",
        )
    if not builds_everywhere and groups.tp.rank() != 0:
        return DataIterators()
    options: dict[str, Any] = {}
    if "vp_stage" in inspect.signature(provider).parameters:
        options["vp_stage"] = vp_stage
    consumed = state.consumed_train_samples
    begin = phase_of(run, consumed).begin
    datasets = provider(list(sample_counts(run, consumed)), **options)
    if not isinstance(datasets, (tuple, list)) or len(datasets) != 3:
        raise ConfigError(
            f"the datasets provider returned {shown(datasets)}.",
            rule="it returns three datasets, for training, validation and test; None is no dataset",
            fix="return train, valid, test",
        )
    train, valid, test = datasets
    if run.data.dataloader_type == "cyclic-megatron":
        print_rank_0(
            " > warning: --dataloader-type cyclic-megatron: the order of the samples depends on the"
            " number of replicas and the micro batch size; cyclic is equal in every layout"
        )
    if is_rank_0() and vp_stage in (None, 0):
        describe_blend(train, begin, run.data.data_audit_path)
    row = run.schedule.eval_batch[1] * run.topology.data_parallel_size
    consumed_valid = 0 if run.schedule.full_validation else state.consumed_valid_samples
    sets = valid if isinstance(valid, list) else [valid]
    packings = [_evaluation_packing(run, groups, dataset) for dataset in sets]
    train_packing = _packing(run, groups, train, _batch_sizes(run), begin)
    test_packing = _evaluation_packing(run, groups, test)
    return DataIterators(
        train_order=getattr(train, "order_identity", lambda: None)() if is_rank_0() else None,
        train=_open(
            run, groups, train, consumed - begin, consumed_before=begin, packing=train_packing
        ),
        train_packing=train_packing,
        train_lengths=_lengths_of_padded(run, train, begin),
        valid=[
            ValidationSet(
                _name_of(dataset) if len(sets) > 1 else "",
                _open(run, groups, dataset, consumed_valid, repeats=True, packing=packing),
                _num_rows(dataset, row),
                packing,
            )
            for dataset, packing in zip(sets, packings, strict=True)
        ],
        test=_open(run, groups, test, 0, repeats=True, packing=test_packing),
        test_packing=test_packing,
        num_test_rows=_num_rows(test, row),
    )


def describe_blend(dataset: Any, first_sample: int, audit_path: str | None) -> None:
    """Print what each corpus gives to the training data of this run, or phase; keep it for audits.

    Args:
        first_sample: number of the first sample of the dataset in the run.
        audit_path: where samples are recorded, if they are.
    """
    shares = shares_of(dataset)
    if len(shares) < 2:
        return
    begin = f" from sample {first_sample:,} on" if first_sample else ""
    heading = f"training data{begin}: {len(dataset):,} samples of {len(shares)} corpora"
    for line in (heading, *(f"  {line}" for line in lines_of(shares))):
        print_rank_0(f" > {line}")
    if audit_path is not None:
        os.makedirs(audit_path, exist_ok=True)
        table = "\n".join(
            [heading, *(f"  {line}" for line in lines_of(shares, max_lines=len(shares)))]
        )
        Path(audit_path, f"blend-{first_sample:012d}.txt").write_text(table + "\n")


def _name_of(dataset: Any) -> str:
    path = getattr(dataset, "dataset_path", None)
    return os.path.basename(path) if path else ""


def _num_rows(dataset: Any, row: int) -> int:
    return 0 if dataset is None else -(-len(dataset) // row)


def _packing(
    run: ResolvedRun,
    groups: ProcessGroupCollection,
    dataset: Any,
    batch_size: Callable[[int], int],
    first_sample: int = 0,
) -> Packing | None:
    """Return how batches of a dataset become rows that ranks share; None: they are not shared."""
    parallel = run.parallelism
    if not parallel.hybrid_context_parallel or dataset is None:
        return None
    share = RankOfPacking(
        rank=groups.dp_cp.rank(),
        num_ranks=groups.dp_cp.size(),
        max_tokens=parallel.max_seqlen_per_dp_cp_rank or run.model.seq_length,
        # Tensor-parallel ranks route different tokens.
        divisor=groups.tp.size()
        if parallel.sequence_parallel or run.experts.num_moe_experts
        else 1,
        microbatch_multiple=groups.pp.size(),
    )
    return Packing(dataset, share, work_of_sample(run), batch_size, first_sample)


def _lengths_of_padded(
    run: ResolvedRun, dataset: Any, first_sample: int
) -> Callable[[int, int], tuple[int, ...]] | None:
    """Return what tells how long samples are that are padded, if they are taken in order."""
    if dataset is None or not run.data.sft or run.data.dataloader_type != "single":
        return None

    def lengths(consumed: int, count: int) -> tuple[int, ...]:
        begin = consumed - first_sample
        return tuple(dataset.num_tokens(n) for n in range(begin, min(begin + count, len(dataset))))

    return lengths


def _evaluation_packing(
    run: ResolvedRun, groups: ProcessGroupCollection, dataset: Any
) -> Packing | None:
    """Return how evaluation batches become rows; they begin again at the end of the dataset."""
    size = run.schedule.eval_batch[0]
    return _packing(run, groups, dataset, lambda _: size)


def _batch_sizes(run: ResolvedRun) -> Callable[[int], int]:
    """Return the size of the global batch after some consumed samples of the run."""
    schedule, replicas = run.schedule, run.topology.data_parallel_size
    sizes = build_num_microbatches_calculator(
        run.topology.rank, **schedule.calculator_settings(replicas, run.model.seq_length)
    )

    def size_after(consumed: int) -> int:
        sizes.update(consumed, consistency_check=False)
        return sizes.get_current_running_global_batch_size()

    return size_after


def work_of_sample(run: ResolvedRun) -> Callable[[int], float]:
    """Return the operations of a sample by its tokens: products of every token, scores of pairs."""
    size = ModelSize.from_settings(run)

    @functools.cache
    def work_of(num_tokens: int) -> float:
        return training_flops(replace(size, seq_length=num_tokens), 1)

    return work_of


def _open(
    run: ResolvedRun,
    groups: ProcessGroupCollection,
    dataset: Any,
    consumed_samples: int,
    *,
    repeats: bool = False,
    consumed_before: int = 0,
    packing: Packing | None = None,
) -> Iterator[Any] | None:
    """Return an iterator of micro batches that continues after `consumed_samples`.

    Args:
        repeats: for evaluations: begin again at the end, because a resumed run may evaluate more
            often, in micro batches of the evaluation's size.
        packing: how batches become rows, where ranks share them.
        consumed_before: samples of earlier phases, which come before the first of this dataset.
    """
    if dataset is None:
        return None
    if repeats and len(dataset) > 0 and run.data.dataloader_type == "single":
        consumed_samples %= len(dataset)
    loader = build_pretraining_data_loader(
        dataset,
        consumed_samples,
        micro_batch_size=run.schedule.eval_batch[1] if repeats else run.schedule.micro_batch_size,
        dp_rank=groups.dp.rank(),
        dp_size=groups.dp.size(),
        dataloader_type=run.data.dataloader_type,
        num_workers=run.data.num_workers,
        seed=run.schedule.seed,
        data_sharding=run.data.data_sharding,
        drop_last=not repeats,
        # What samples have different numbers of, the dataset joins.
        collate=getattr(dataset, "collate", collate_in_memory),
        packing=packing,
    )
    if repeats:
        return _timed(_again_and_again(loader))
    if run.data.data_audit_path is None or not _records_samples(groups):
        return _timed(_once(loader))
    first = consumed_before + consumed_samples
    return audited(
        _timed(_once(loader)),
        run.data.data_audit_path,
        first_sample=first + groups.dp.rank() * run.schedule.micro_batch_size,
        row_size=run.schedule.micro_batch_size * run.topology.data_parallel_size,
        dp_rank=groups.dp.rank(),
    )


def _records_samples(groups: ProcessGroupCollection) -> bool:
    """Return whether this is the rank of its replica that keeps the record."""
    return all(group.rank() == 0 for group in (groups.tp, groups.pp, groups.cp))


_END = object()


def _timed(batches: Iterator[Any]) -> Iterator[Any]:
    """Yield the batches; the time that each takes counts as waiting for data."""
    try:
        while True:
            with PLACE.waits.loading():
                batch = next(batches, _END)
            if batch is _END:
                return
            yield batch
    finally:
        if isinstance(batches, Generator):
            batches.close()


def _once(loader: Any) -> Iterator[Any]:
    """Yield the batches of a loader; its worker processes start with the first one."""
    # They are forked with this process' garbage. Collecting it there would destroy objects
    # (process groups, other loaders) whose threads exist only here, which can crash a worker.
    if loader.num_workers:
        gc.collect()
    yield from loader


def _again_and_again(loader: Any) -> Iterator[Any]:
    while True:
        yield from _once(loader)
        # The second pass and all later ones are whole.
        loader.batch_sampler.consumed_samples = 0
