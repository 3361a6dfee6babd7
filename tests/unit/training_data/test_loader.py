"""The batches of a rank: which samples, in which order, after any resume, with any workers."""

import multiprocessing
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
import torch
from torch.utils.data import Dataset

from megatron.core.foundation.errors import ConfigError, DataError, WorkerLostError
from megatron.training.datasets.data_samplers import (
    MegatronPretrainingRandomSampler,
    MegatronPretrainingSampler,
)
from megatron.training.datasets.loader import build_pretraining_data_loader


class Numbers(Dataset):
    """Samples that are their own numbers."""

    def __init__(self, size=64, fail_at=None, die_at=None):
        self.size, self.fail_at, self.die_at = size, fail_at, die_at

    def __len__(self):
        return self.size

    def __getitem__(self, idx):
        if idx is not None and idx == self.fail_at:
            raise DataError("token 70000 is outside.", rule="a rule", fix="a fix")
        if idx is not None and idx == self.die_at:
            os.kill(os.getpid(), signal.SIGKILL)
        return {"number": torch.tensor(-1 if idx is None else idx)}


class Kinds(Dataset):
    """Samples of everything that a batch may hold."""

    def __len__(self):
        return 8

    def __getitem__(self, idx):
        return {
            "tokens": torch.arange(idx, idx + 5),
            "loss_mask": torch.ones(5) * idx,
            "attention_mask": torch.ones(1, 3, 3).tril() > idx % 2,
            "array": np.arange(3, dtype=np.int32) + idx,
            "pair": (torch.tensor(idx, dtype=torch.float64), 0.5 * idx),
            "nested": {"half": torch.tensor([idx], dtype=torch.float16), "name": f"sample {idx}"},
        }


def first_batches(count, dataset=None, consumed=0, micro=2, rank=0, size=2, **settings):
    loader = build_pretraining_data_loader(
        dataset or Numbers(),
        consumed,
        micro_batch_size=micro,
        dp_rank=rank,
        dp_size=size,
        **settings,
    )
    batches = iter(loader)
    taken = [next(batches)["number"].tolist() for _ in range(count)]
    del batches, loader
    return taken


def test_single_hands_out_rows_in_order_and_ranks_take_slices():
    assert first_batches(3, rank=0) == [[0, 1], [4, 5], [8, 9]]
    assert first_batches(3, rank=1) == [[2, 3], [6, 7], [10, 11]]
    assert first_batches(2, rank=1, consumed=5) == [[7, 8], [11, 12]], "any start"


@pytest.mark.parametrize("kind", ["single", "cyclic", "cyclic-megatron"])
@pytest.mark.parametrize("sharding", [True, False])
@pytest.mark.parametrize("rank", [0, 1])
def test_a_resumed_loader_continues_where_the_first_stopped(kind, sharding, rank):
    settings = {"dataloader_type": kind, "data_sharding": sharding, "rank": rank}
    dataset = Numbers(31)
    count = 7 if kind == "single" else 20
    straight = first_batches(count, dataset, **settings)
    for stop in range(count):
        rest = first_batches(count - stop, dataset, consumed=stop * 4, **settings)
        assert straight[stop:] == rest


@pytest.mark.parametrize("kind", ["single", "cyclic", "cyclic-megatron"])
def test_workers_change_neither_the_order_nor_the_global_random_state(kind):
    before = torch.random.get_rng_state()
    here = first_batches(12, dataloader_type=kind, consumed=8)
    assert first_batches(12, dataloader_type=kind, consumed=8, num_workers=2) == here
    assert torch.equal(torch.random.get_rng_state(), before)


def cyclic_samples(size, micro, begin, end, number_of_samples):
    """The samples from number `begin` to `end` of a cyclic order, as ranks take them together."""
    rows = (end - begin) // (micro * size)
    settings = {"micro": micro, "size": size, "consumed": begin, "dataloader_type": "cyclic"}
    ranks = [
        first_batches(rows, Numbers(number_of_samples), rank=rank, **settings)
        for rank in range(size)
    ]
    return [number for row in zip(*ranks, strict=True) for batch in row for number in batch]


@pytest.mark.parametrize("number_of_samples", [1, 5, 31])
def test_a_cyclic_order_has_every_sample_once_in_each_epoch_and_each_epoch_its_own_order(
    number_of_samples,
):
    taken = cyclic_samples(1, 1, 0, 6 * number_of_samples, number_of_samples)
    epochs = [tuple(taken[i * number_of_samples : (i + 1) * number_of_samples]) for i in range(6)]
    assert all(sorted(epoch) == list(range(number_of_samples)) for epoch in epochs)
    assert number_of_samples < 5 or len(set(epochs)) > 4


@pytest.mark.parametrize("number_of_samples", [3, 31, 64])
def test_a_cyclic_order_is_that_of_one_process_with_any_ranks_micro_batches_and_resumes(
    number_of_samples,
):
    whole = cyclic_samples(1, 1, 0, 144, number_of_samples)
    for size, micro in [(1, 2), (2, 1), (2, 3), (4, 2), (3, 4)]:
        row = size * micro
        begin = 0
        for end in (2 * row, 5 * row, 144 // row * row):
            taken = cyclic_samples(size, micro, begin, end, number_of_samples)
            assert taken == whole[begin:end], (size, micro)
            begin = end


@pytest.mark.parametrize("sharding", [True, False])
def test_an_epoch_of_megatrons_order_takes_no_sample_twice_and_the_next_differs(sharding):
    epochs = []
    for epoch in range(2):
        ranks = [
            first_batches(
                7,
                Numbers(31),
                rank=rank,
                consumed=28 * epoch,
                dataloader_type="cyclic-megatron",
                data_sharding=sharding,
            )
            for rank in range(2)
        ]
        taken = [number for rank in ranks for batch in rank for number in batch]
        assert len(set(taken)) == 28
        epochs.append(taken)
    assert epochs[0] != epochs[1]


def test_megatrons_order_is_torchs_permutation_under_the_epoch_number():
    consumed = 28 + 8
    shuffled = torch.randperm(30, generator=torch.Generator().manual_seed(1)).tolist()
    settings = {"consumed": consumed, "dataloader_type": "cyclic-megatron", "rank": 1}
    got = first_batches(5, Numbers(31), data_sharding=False, **settings)
    own = shuffled[8:28][1::2]
    assert got == [own[i : i + 2] for i in range(0, 10, 2)]
    bucket = torch.randperm(14, generator=torch.Generator().manual_seed(1)) + 14
    own = bucket[4:].tolist()
    got = first_batches(5, Numbers(31), data_sharding=True, **settings)
    assert got == [own[i : i + 2] for i in range(0, 10, 2)]


def test_batches_of_workers_are_those_without_workers_and_use_no_shared_memory(monkeypatch):
    def refuse(*_):
        raise AssertionError("a file of /dev/shm")

    def taken(num_workers):
        loader = build_pretraining_data_loader(
            Kinds(), 0, micro_batch_size=2, dp_rank=0, dp_size=1, num_workers=num_workers
        )
        return list(loader)

    expected = taken(0)
    monkeypatch.setattr(torch.UntypedStorage, "_share_fd_cpu_", refuse)
    monkeypatch.setattr(torch.UntypedStorage, "_share_filename_cpu_", refuse)
    monkeypatch.setattr(torch.UntypedStorage, "_new_shared", refuse)
    found = taken(2)
    assert [list(batch) for batch in found] == [list(batch) for batch in expected]
    for batch, same in zip(found, expected, strict=True):
        for name, value in same.items():
            if isinstance(value, torch.Tensor):
                assert batch[name].dtype == value.dtype
                assert torch.equal(batch[name], value), name
            else:
                assert str(batch[name]) == str(value), name


@pytest.mark.parametrize("num_workers", [0, 2])
def test_an_error_reads_the_same_with_and_without_workers(num_workers):
    with pytest.raises(DataError) as caught:
        first_batches(3, Numbers(fail_at=5), num_workers=num_workers)
    assert str(caught.value) == "token 70000 is outside.\n  rule:  a rule\n  fix:   a fix"


def test_a_killed_worker_is_named():
    with pytest.raises(
        WorkerLostError, match="worker 0 was killed by signal 9, in most cases for lack"
    ):
        first_batches(3, Numbers(die_at=5), num_workers=1)


def worker_and_batches(dataset=None):
    """Return the batches of a loader with one worker, and that worker's process."""
    loader = build_pretraining_data_loader(
        dataset or Numbers(), 0, micro_batch_size=2, dp_rank=0, dp_size=1, num_workers=1
    )
    others = set(multiprocessing.active_children())
    batches = iter(loader)
    next(batches)
    (worker,) = set(multiprocessing.active_children()) - others
    return worker, batches


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_that_is_meant_for_the_run_does_not_end_its_workers(number):
    worker, batches = worker_and_batches()
    for _ in range(3):
        subprocess.run(["kill", f"-{number}", str(worker.pid)], check=True)
        time.sleep(0.1)
    assert len(list(batches)) == 31


def test_the_training_process_can_end_its_workers():
    worker, batches = worker_and_batches()
    worker.terminate()
    worker.join(10)
    assert worker.exitcode == 0
    batches.close()


def test_a_worker_dies_with_the_training_process():
    """No grandchild stays: the worker is told by the kernel, busy or not."""
    code = (
        "import os, signal, sys\n"
        "from tests.unit.training_data.test_loader import worker_and_batches\n"
        "worker, batches = worker_and_batches()\n"
        "print(worker.pid, flush=True)\n"
        "os.kill(os.getpid(), signal.SIGKILL)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    worker = Path(f"/proc/{int(done.stdout)}")
    deadline = time.monotonic() + 3  # the worker itself looks every 5 s
    while worker.exists() and " Z " not in (worker / "stat").read_text():
        assert time.monotonic() < deadline
        time.sleep(0.05)


def test_a_worker_that_dies_fails_the_next_batch_and_nothing_before():
    worker, batches = worker_and_batches()
    worker.kill()
    # Whatever else the process does at the death of the worker is still running: it must not be
    # joined before that, since torch's handler looks for the dead.
    os.waitid(os.P_PID, worker.pid, os.WEXITED | os.WNOWAIT)
    time.sleep(0.2)
    worker.join(10)
    with pytest.raises(WorkerLostError, match="worker 0 was killed by signal 9"):
        list(batches)


def test_what_the_kernel_killed_for_memory_is_said_of_a_dead_worker(monkeypatch):
    killed = iter((3, 5))
    monkeypatch.setattr(
        "megatron.training.datasets.loader.num_killed_for_memory", lambda: next(killed)
    )
    worker, batches = worker_and_batches()
    worker.kill()
    with pytest.raises(
        WorkerLostError, match=r"the kernel has killed 2 process\(es\) of this control"
    ):
        list(batches)


def test_the_last_row_is_dropped_or_filled_with_samples_without_loss():
    def all_batches(rank, drop_last):
        loader = build_pretraining_data_loader(
            Numbers(9),
            4,
            micro_batch_size=2,
            dp_rank=rank,
            dp_size=2,
            drop_last=drop_last,
        )
        return [batch["number"].tolist() for batch in loader]

    assert all_batches(0, True) == [[4, 5]]
    assert all_batches(0, False) == [[4, 5], [8, -1]]
    assert all_batches(1, False) == [[6, 7], [-1, -1]]


def test_impossible_requests_are_refused():
    with pytest.raises(DataError, match="64 samples were consumed of a dataset of 64"):
        MegatronPretrainingSampler(64, 64, 2, 0, 2)
    with pytest.raises(DataError, match="a dataset of 0 samples"):
        MegatronPretrainingSampler(0, 0, 2, 0, 2)
    with pytest.raises(DataError, match="cannot fill one micro batch on 4 data-parallel ranks"):
        MegatronPretrainingRandomSampler(None, 7, 0, 2, 0, 4, True)
    with pytest.raises(
        DataError, match="30 consumed samples end within a micro batch of all ranks, 4"
    ):
        MegatronPretrainingRandomSampler(None, 64, 30, 2, 0, 2, True)
    with pytest.raises(ConfigError, match="--dataloader-type batch is unknown"):
        first_batches(1, dataloader_type="batch")
    with pytest.raises(ConfigError, match="rank 2 of 2"):
        first_batches(1, rank=2)
