"""Build datasets, and iterators of micro batches for the ranks that read data."""

from __future__ import annotations

import functools
import gc
import inspect
import itertools
import os
from collections.abc import Callable, Generator, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

from megatron.core.datasets.blended_dataset import lines_of, shares_of
from megatron.core.foundation.errors import ConfigError, shown
from megatron.core.foundation.flight_recorder import PROGRESS
from megatron.core.num_microbatches_calculator import build_num_microbatches_calculator
from megatron.core.pipeline_parallel.schedule import StepPlan as SchedulePlan
from megatron.core.pipeline_parallel.schedule_definitions import schedule_named
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.transport import torch_collectives
from megatron.core.transport.object_collectives import max_across_ranks
from megatron.training.config.resolved import ResolvedRun, phase_of
from megatron.training.datasets.audit import record_samples
from megatron.training.datasets.dynamic_cp import DpCpRank, Packing
from megatron.training.datasets.loader import build_pretraining_data_loader, collate_in_memory
from megatron.training.launch.printing import is_rank_0, print_rank_0
from megatron.training.metrics.flops import training_flops
from megatron.training.metrics.model_size import ModelSize
from megatron.training.run.context import DataIterators, ValidationSet
from megatron.training.run.state import TrainState

DatasetProvider = Callable[..., Any]


class SampleCounts(NamedTuple):
    """Number of samples that the run needs from each split; None is the whole split once."""

    train: int
    valid: int | None
    test: int


def sample_counts(run: ResolvedRun, consumed_samples: int = 0) -> SampleCounts:
    """Return the numbers of samples for training, all evaluations and the final test.

    Args:
        consumed_samples: selects the phase of the training data.
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
    """Build the datasets and open iterators at the consumed samples of the run.

    Args:
        provider: `provider([train, valid, test])`, optionally with the arguments `vp_stage` and
            `run`, returns three datasets. With the attribute `is_distributed = True` all ranks call
            it, and it chooses the datasets to build; otherwise only tensor-parallel rank 0 calls
            it, and the forward step must broadcast the batches.
    Raises:
        ConfigError: not all ranks build the datasets with dynamic context parallelism.
    Communication:
        over all processes, an all-reduce of one number for the count of validation sets, for the
        length of each, and for the length of the test set.
    """
    num_chunks = run.parallelism.virtual_pipeline_model_parallel_size or 1
    per_chunk = [
        _chunk_data(run, provider, groups, state, chunk if num_chunks > 1 else None)
        for chunk in range(num_chunks)
    ]
    # Only ranks with data have the number of sets and their lengths.
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
    """Join the iterators of one validation set over this rank's chunks, which may read no data."""
    read: list[Any] = [each.data for each in found] or [None] * num_chunks
    name = next((each.name for each in found if each.name), "")
    packing = found[0].packing if found else None
    num_rows = max((each.num_rows for each in found), default=0)
    return ValidationSet(name, _one_or_list(read), num_rows, packing)


def _one_or_list(iterators: list[Any]) -> Any:
    """Return the iterator of a single chunk, or the list for several, as schedules expect."""
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
            rule="every rank computes the number of micro batches from the samples of a batch",
            flags=["--hybrid-context-parallel"],
            fix="set is_distributed = True on the datasets provider, and build them on every rank",
        )
    if not builds_everywhere and groups.tp.rank() != 0:
        return DataIterators()
    options: dict[str, Any] = {"vp_stage": vp_stage, "run": run}
    known = inspect.signature(provider).parameters
    options = {name: value for name, value in options.items() if name in known}
    consumed = state.consumed_train_samples
    begin = phase_of(run, consumed).begin
    datasets = provider(list(sample_counts(run, consumed)), **options)
    if not isinstance(datasets, (tuple, list)) or len(datasets) != 3:
        raise ConfigError(
            f"the datasets provider returned {shown(datasets)}.",
            rule="it returns three datasets for training, validation and test, each may be None",
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
    stride = run.schedule.eval_batch[1] * run.topology.data_parallel_size
    consumed_valid = 0 if run.schedule.full_validation else state.consumed_valid_samples
    sets = valid if isinstance(valid, list) else [valid]
    packings = [_evaluation_packing(run, groups, dataset) for dataset in sets]
    train_packing = _packing(run, groups, train, _batch_sizes(run), begin)
    test_packing = _evaluation_packing(run, groups, test)
    return DataIterators(
        train_order=getattr(train, "order_fingerprint", lambda: None)() if is_rank_0() else None,
        train=_open(
            run, groups, train, consumed - begin, consumed_before=begin, packing=train_packing
        ),
        train_packing=train_packing,
        train_lengths=_lengths_of_padded(run, train, begin),
        valid=[
            ValidationSet(
                _name_of(dataset) if len(sets) > 1 else "",
                _open(run, groups, dataset, consumed_valid, repeats=True, packing=packing),
                _num_micro_batches(dataset, stride),
                packing,
            )
            for dataset, packing in zip(sets, packings, strict=True)
        ],
        test=_open(run, groups, test, 0, repeats=True, packing=test_packing),
        test_packing=test_packing,
        num_test_rows=_num_micro_batches(test, stride),
    )


def describe_blend(dataset: Any, first_sample: int, audit_path: str | None) -> None:
    """Print the share of each corpus in the training data of this run or phase.

    Args:
        first_sample: number of the first sample of the dataset in the run.
        audit_path: directory of the sample records; the table is also written to it, if given.
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


def _num_micro_batches(dataset: Any, stride: int) -> int:
    return 0 if dataset is None else -(-len(dataset) // stride)


def _packing(
    run: ResolvedRun,
    groups: ProcessGroupCollection,
    dataset: Any,
    batch_size: Callable[[int], int],
    first_sample: int = 0,
) -> Packing | None:
    """Return the packing of a dataset; None without dynamic context parallelism."""
    parallel, stages = run.parallelism, groups.pp.size()
    if not parallel.hybrid_context_parallel or dataset is None:
        return None
    schedule = schedule_named(parallel.pipeline_schedule)
    chunks = parallel.virtual_pipeline_model_parallel_size or 1
    fewest = schedule.min_microbatches(SchedulePlan(schedule.name, stages, chunks, 1))
    rank = DpCpRank(
        rank=groups.dp_cp.rank(),
        num_ranks=groups.dp_cp.size(),
        max_tokens=parallel.max_seqlen_per_dp_cp_rank or run.model.seq_length,
        # Tensor-parallel ranks route different tokens.
        divisor=groups.tp.size()
        if parallel.sequence_parallel or run.experts.num_moe_experts
        else 1,
        microbatch_multiple=max(stages, fewest if stages > 1 else 1),
    )
    return Packing(dataset, rank, work_of_sample(run), batch_size, first_sample)


def _lengths_of_padded(
    run: ResolvedRun, dataset: Any, first_sample: int
) -> Callable[[int, int], tuple[int, ...]] | None:
    """Return (consumed samples, count) -> lengths of padded samples; None if samples are full."""
    if dataset is None or not run.data.sft or run.data.dataloader_type != "single":
        return None

    def lengths(consumed: int, count: int) -> tuple[int, ...]:
        begin = consumed - first_sample
        return tuple(dataset.num_tokens(n) for n in range(begin, min(begin + count, len(dataset))))

    return lengths


def _evaluation_packing(
    run: ResolvedRun, groups: ProcessGroupCollection, dataset: Any
) -> Packing | None:
    """Return the packing of evaluation batches, which repeat the dataset."""
    size = run.schedule.eval_batch[0]
    return _packing(run, groups, dataset, lambda _: size)


def _batch_sizes(run: ResolvedRun) -> Callable[[int], int]:
    """Return a function: consumed samples of the run -> size of the next global batch."""
    schedule, replicas = run.schedule, run.topology.data_parallel_size
    sizes = build_num_microbatches_calculator(
        run.topology.rank, **schedule.calculator_settings(replicas, run.model.seq_length)
    )

    def size_after(consumed: int) -> int:
        sizes.update(consumed, consistency_check=False)
        return sizes.get_current_running_global_batch_size()

    return size_after


def work_of_sample(run: ResolvedRun) -> Callable[[int], float]:
    """Return a function: number of tokens of a sample -> its FLOPs."""
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
        repeats: for evaluations: repeat the dataset, because a resumed run may evaluate more often,
            and use the micro batch size of evaluations.
        packing: packing of dynamic context parallelism.
        consumed_before: samples of earlier phases.
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
        # A dataset with entries of different sizes, for example images, has its own function.
        collate=getattr(dataset, "collate", collate_in_memory),
        packing=packing,
    )
    audit_path = run.data.data_audit_path
    # One rank of each replica records the samples.
    records = all(group.rank() == 0 for group in (groups.tp, groups.pp, groups.cp))
    if repeats or audit_path is None or not records:
        return _micro_batches(loader, repeats=repeats)
    os.makedirs(audit_path, exist_ok=True)
    size = run.schedule.micro_batch_size
    first = consumed_before + consumed_samples + groups.dp.rank() * size
    numbers = itertools.count(first, size * run.topology.data_parallel_size)

    def record(batch: Any) -> None:
        record_samples(audit_path, groups.dp.rank(), next(numbers), batch)

    return _micro_batches(loader, repeats=repeats, record=record)


_END = object()


def _micro_batches(
    loader: Any, *, repeats: bool, record: Callable[[Any], None] | None = None
) -> Iterator[Any]:
    """Yield the micro batches of a loader; its worker processes start with the first one.

    The time until each micro batch counts as waiting for data.

    Args:
        repeats: restart at the end.
        record: called with each micro batch.
    """
    while True:
        # Workers are forked with this process's garbage. Collecting it in a worker would destroy
        # objects (process groups, other loaders) without their threads, which can crash the worker.
        if loader.num_workers:
            gc.collect()
        batches = iter(loader)
        try:
            while True:
                with PROGRESS.waits.loading():
                    batch = next(batches, _END)
                if batch is _END:
                    break
                if record is not None:
                    record(batch)
                yield batch
        finally:
            if isinstance(batches, Generator):
                batches.close()
        if not repeats:
            return
        # Later passes begin at the first sample.
        loader.batch_sampler.consumed_samples = 0
