"""Threads that hash and read: what they return, and how many there are."""

from __future__ import annotations

import hashlib
from pathlib import Path

import pytest
import torch

from megatron.core.dist_checkpointing.durable import DamagedCheckpointError, open_file
from megatron.core.dist_checkpointing.shard_file import (
    BLOCK_BYTES,
    as_bytes,
    durable_sink,
    read_block,
    write_shards,
)
from megatron.core.dist_checkpointing.work_threads import (
    WorkThreads,
    threads_per_rank,
)


def test_a_future_has_the_result_or_the_exception() -> None:
    with WorkThreads(2) as threads:
        results = [threads.start(divmod, 7, n) for n in (2, 3, 0)]
    assert [r.result() for r in results[:2]] == [(3, 1), (2, 1)]
    with pytest.raises(ZeroDivisionError):
        results[2].result()


@pytest.mark.parametrize(
    ("ranks", "cores", "expected"),
    [("1", 2, 2), ("2", 2, 1), ("8", 2, 1), ("8", 192, 4), ("many", 3, 3), ("0", 3, 3)],
)
def test_ranks_of_a_machine_share_its_cores(ranks, cores, expected, monkeypatch) -> None:
    monkeypatch.setenv("LOCAL_WORLD_SIZE", ranks)
    monkeypatch.setattr("os.sched_getaffinity", lambda pid: set(range(cores)), raising=False)
    assert threads_per_rank() == expected


@pytest.mark.parametrize("num_threads", [1, 3])
def test_hashes_are_those_of_the_blocks_for_any_number_of_threads(
    num_threads: int, tmp_path: Path
) -> None:
    tensors = [
        ("long", torch.arange(3 * BLOCK_BYTES // 4 + 5, dtype=torch.int32)),
        ("strided", torch.arange(BLOCK_BYTES // 2, dtype=torch.int32).view(64, -1).t()),
        ("empty", torch.empty(0)),
        ("small", torch.ones(3, dtype=torch.bfloat16)),
    ]
    with durable_sink(tmp_path / "f") as sink:
        stored = write_shards("f", tensors, {}, sink=sink, num_threads=num_threads)
    for (name, tensor), shard in zip(tensors, stored.shards, strict=True):
        data = as_bytes(tensor.contiguous())
        blocks = [data[b : b + BLOCK_BYTES] for b in range(0, len(data), BLOCK_BYTES)]
        assert shard.hashes == tuple(hashlib.sha256(b).hexdigest() for b in blocks), name
    with open_file(tmp_path, "f") as file:
        into = memoryview(bytearray(stored.shards[-1].num_bytes))
        begin, (expected,) = stored.shards[-1].begin, stored.shards[-1].hashes
        read_block(file, into, begin, expected, tmp_path / "f")
        with pytest.raises(DamagedCheckpointError, match="f is corrupt"):
            read_block(file, into, begin - 1, expected, tmp_path / "f")
