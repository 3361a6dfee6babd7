"""The loader of one data-parallel rank.

Batches are in the sampler's order with any number of workers. A loader does not change the global
random state. An error in a worker is raised as without workers.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import re
import signal
import threading
from collections.abc import Callable, Iterator, Sequence
from multiprocessing.connection import wait
from multiprocessing.reduction import ForkingPickler
from typing import Any

import torch
from torch import Tensor
from torch.multiprocessing.reductions import reduce_tensor
from torch.utils.data import DataLoader, Dataset
from torch.utils.data._utils.collate import collate as collate_with
from torch.utils.data._utils.collate import default_collate_fn_map

from megatron.core.foundation.device import device_type
from megatron.core.foundation.errors import ConfigError, MegatronError, WorkerLostError
from megatron.core.foundation.processes import (
    describe_exit,
    die_with_parent,
    ignore_stop_signals_except_from,
    num_killed_for_memory,
    stop_signals_blocked,
)
from megatron.core.parameters.rng import derive_seed
from megatron.training.datasets.data_samplers import (
    CyclicSampler,
    MegatronPretrainingRandomSampler,
    MegatronPretrainingSampler,
    PretrainingSampler,
)
from megatron.training.datasets.dynamic_cp import PackedSequences, PackedSequenceSampler, Packing

DATALOADER_TYPES = ("single", "cyclic", "cyclic-megatron", "external")


def collate_in_memory(samples: Sequence[object]) -> Any:
    """Stack samples like torch's `default_collate`, but without shared memory in workers.

    Each [...] of the samples becomes [b, ...].
    """

    def stack(tensors: Sequence[Tensor], **_: object) -> Tensor:
        return torch.stack(list(tensors))

    return collate_with(samples, collate_fn_map={**default_collate_fn_map, Tensor: stack})


def build_pretraining_data_loader(
    dataset: Any,
    consumed_samples: int,
    *,
    micro_batch_size: int,
    dp_rank: int,
    dp_size: int,
    dataloader_type: str = "single",
    num_workers: int = 0,
    seed: int = 1234,
    data_sharding: bool = True,
    drop_last: bool = True,
    collate: Callable[..., object] = collate_in_memory,
    packing: Packing | None = None,
) -> Any:
    """Make the loader of this rank's micro batches.

    Args:
        dataset: sample number -> sample; None on a rank without data, which returns None.
        consumed_samples: samples of all ranks before the first batch.
        micro_batch_size: samples of each batch.
        dp_rank: rank in the data-parallel group.
        dp_size: size of the data-parallel group.
        dataloader_type: `single` in order; `cyclic` in infinitely many shuffled epochs;
            `cyclic-megatron` in the epochs of Megatron-LM, whose order depends on `dp_size` and
            `micro_batch_size`; `external` if `dataset` is a loader.
        num_workers: processes that load samples; 0 loads them in this process. The order does not
            depend on it.
        seed: seed of the workers' random state.
        data_sharding: see `MegatronPretrainingRandomSampler`.
        drop_last: see `MegatronPretrainingSampler`.
        collate: stacks the samples of a batch.
        packing: packs global batches of `dataset` into sequences that several ranks split. The
            other sizes and the type are then unused, and samples are taken in order.
    Returns:
        a torch `DataLoader`, or `dataset` itself if `external`.
    Raises:
        ConfigError: an unknown type.
        DataError: no samples are left.
    """
    if dataset is None or dataloader_type == "external":
        return dataset
    sampler: PackedSequenceSampler | PretrainingSampler
    sizes = (consumed_samples, micro_batch_size, dp_rank, dp_size)
    if packing is not None:
        dataset = PackedSequences(packing)
        sampler = PackedSequenceSampler(packing, consumed_samples)
    elif dataloader_type == "single":
        sampler = MegatronPretrainingSampler(len(dataset), *sizes, drop_last=drop_last)
    elif dataloader_type == "cyclic":
        sampler = CyclicSampler(len(dataset), *sizes)
    elif dataloader_type == "cyclic-megatron":
        sampler = MegatronPretrainingRandomSampler(
            dataset, len(dataset), *sizes, data_sharding=data_sharding
        )
    else:
        raise ConfigError(
            f"--dataloader-type {dataloader_type} is unknown.",
            rule=f"one of {', '.join(DATALOADER_TYPES)}",
            flags=["--dataloader-type"],
        )
    return PretrainingDataLoader(
        _MicroBatches(dataset, collate),
        batch_sampler=sampler,
        num_workers=num_workers,
        pin_memory=device_type() != "cpu",
        collate_fn=_unchanged,
        # Without its own generator a loader draws from the global one, which then differs
        # between a run and its resumed copy.
        generator=torch.Generator().manual_seed(derive_seed("data loader", seed, dp_rank)),
        worker_init_fn=_begin_work,
    )


class PretrainingDataLoader(DataLoader[Any]):
    """A `DataLoader` that raises a worker's original error, and names a dead worker.

    Its workers run until the loader is closed, even if their process group receives a signal: they
    are needed to finish the current step. If a worker dies, only the next batch fails.
    """

    def __iter__(self) -> Iterator[Any]:  # type: ignore[override]
        killed_before = num_killed_for_memory()
        with stop_signals_blocked():
            batches = super().__iter__()
        guard = _guard_of_child_ends()
        while True:
            problem: MegatronError | None = None
            batch = None
            try:
                with guard.waiting():
                    batch = next(batches)
            except StopIteration:
                return
            except (RuntimeError, OSError, EOFError) as error:
                workers = getattr(batches, "_workers", ())
                problem = _worker_death(error, workers, killed_before)
                if problem is None:
                    raise
            if isinstance(batch, MegatronError):
                problem = batch
            if problem is not None:
                # End the workers now: the error references this frame, which would keep them
                # alive. This also avoids a reference circle between the error and the frame.
                del batch, batches
                try:
                    raise problem
                finally:
                    del problem
            yield batch


def _begin_work(_number: int) -> None:
    """Set up a new worker: it ends with the training process and ignores signals to the run."""
    ForkingPickler.register(Tensor, _reduced)
    parent = multiprocessing.parent_process()
    if parent is None or parent.pid is None:
        return
    # A fork server ends with the training process, and torch's worker detects that.
    if multiprocessing.get_start_method() != "forkserver":
        die_with_parent(parent.pid)
    ignore_stop_signals_except_from(parent.pid)


class _ChildEnds:
    """Wraps torch's handler of SIGCHLD, which raises if a worker has died.

    Without this wrapper the handler would raise anywhere: in a save, in a step, in `__del__`. The
    wrapper calls it only while the process waits for a batch.
    """

    def __init__(self, handler: Callable[..., Any]) -> None:
        self._handler = handler
        self._num_waiting = 0
        self._is_pending = False

    def __call__(self, number: int, frame: Any) -> None:
        if self._num_waiting:
            self._handler(number, frame)
        else:
            self._is_pending = True

    @contextlib.contextmanager
    def waiting(self) -> Iterator[None]:
        """Let the handler raise in this block, also for a signal from before the block."""
        self._num_waiting += 1
        try:
            if self._is_pending:
                self._is_pending = False
                self._handler(signal.SIGCHLD, None)
            yield
        finally:
            self._num_waiting -= 1


def _guard_of_child_ends() -> _ChildEnds:
    """Return the wrapper of torch's handler, or of a handler without effect."""
    handler = signal.getsignal(signal.SIGCHLD)
    if isinstance(handler, _ChildEnds):
        return handler
    is_torchs = getattr(handler, "__module__", "").startswith("torch.utils.data")
    if not is_torchs or threading.current_thread() is not threading.main_thread():
        return _ChildEnds(lambda number, frame: None)
    assert callable(handler)
    guard = _ChildEnds(handler)
    signal.signal(signal.SIGCHLD, guard)
    return guard


class _MicroBatches(Dataset[Any]):
    """Loads micro batches; returns errors as items, as torch would turn them into tracebacks."""

    def __init__(self, dataset: Any, collate: Callable[..., object]) -> None:
        self.dataset = dataset
        self.collate = collate

    def __len__(self) -> int:
        return len(self.dataset)

    def __getitems__(self, numbers: Sequence[Any]) -> Any:
        """Return the micro batch of these samples. torch calls this for each batch."""
        try:
            batch = self.collate([self.dataset[number] for number in numbers])
        except MegatronError as error:
            return error
        return batch


def _unchanged(batch: Any) -> Any:
    return batch


def _reduced(tensor: Tensor) -> tuple[Callable[..., Tensor], tuple[Any, ...]]:
    """Send a tensor of a worker through its pipe, as an array.

    torch would send each tensor as a file in /dev/shm. A worker that is killed before it unlinks
    the file leaves it there, and in containers /dev/shm often has only 64 MB.
    """
    if tensor.dtype is torch.bfloat16:  # numpy has none
        return reduce_tensor(tensor)
    return torch.from_numpy, (tensor.numpy(),)


def _worker_death(
    error: Exception, workers: Sequence[Any], killed_before: int | None
) -> WorkerLostError | None:
    """Return an error that names the dead worker and its signal; None if no worker died."""
    # A batch is fetched from its worker, which may have died after announcing the batch.
    is_fetch = not isinstance(error, RuntimeError)
    if is_fetch and not (workers and wait([each.sentinel for each in workers], timeout=1.0)):
        return None
    if not is_fetch and not re.match(r"DataLoader worker \(pid", str(error)):
        return None
    codes = [(number, worker.exitcode) for number, worker in enumerate(workers)]
    ends = [f"worker {number} {describe_exit(code)}" for number, code in codes if code]
    killed = num_killed_for_memory()
    if killed is not None and killed_before is not None and killed > killed_before:
        ends.append(
            f"and the kernel has killed {killed - killed_before} process(es) of this control group"
            " for lack of memory since the workers began"
        )
    return WorkerLostError(
        f"a loader worker process died: {', '.join(ends) or str(error) or type(error).__name__}.",
        rule="--num-workers processes load samples for the training process",
        flags=["--num-workers"],
        fix="check the free memory; --num-workers 0 loads samples in the training process. A"
        " resumed run continues with the same samples",
    )
