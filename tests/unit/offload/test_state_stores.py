"""Columns in files behave as columns in memory, in bounded memory, and fail with a reason."""

import os

import pytest
import torch

from megatron.core.foundation.errors import ConfigError
from megatron.core.offload.state_stores import (
    FileStateStore,
    HostStateStore,
    available_host_bytes,
    host_memory_problem,
)

BLOCK_BYTES = [16, 5, 8]


def stores(directory, num_blocks, chunk_blocks):
    yield FileStateStore(directory, BLOCK_BYTES, num_blocks, chunk_blocks=chunk_blocks)
    yield HostStateStore(
        BLOCK_BYTES, num_blocks, chunk_blocks=chunk_blocks, device=torch.device("cpu")
    )


def run(store, num_sweeps):
    """Change every byte by its place, sweep after sweep."""
    for sweep in range(num_sweeps):
        for number, columns in store.sweep():
            for place, column in enumerate(columns):
                column.add_(number + 3 * place + sweep + 1)
    return [store.column(place).clone() for place in range(len(BLOCK_BYTES))]


@pytest.mark.parametrize("num_blocks", [1, 7, 64, 1000])
@pytest.mark.parametrize("chunk_blocks", [1, 7, 64, 2000])
def test_a_file_keeps_what_memory_keeps(num_blocks, chunk_blocks, tmp_path):
    if num_blocks / chunk_blocks > 200:
        chunk_blocks = 10
    found = [run(store, 3) for store in stores(tmp_path, num_blocks, chunk_blocks)]
    for ours, theirs in zip(*found, strict=True):
        assert torch.equal(ours, theirs)


def test_a_sweep_may_be_left_half_way(tmp_path):
    store = FileStateStore(tmp_path, BLOCK_BYTES, 50, chunk_blocks=4)
    for number, columns in store.sweep():
        columns[0].fill_(7)
        if number == 5:
            break
    # Chunk 5 was not handed back: only what came before it is kept.
    column = store.column(0)
    assert (column[: 5 * 4] == 7).all()
    assert [number for number, _ in store.sweep()] == list(range(13))


def test_what_is_written_into_a_column_is_seen_by_the_next_sweep(tmp_path):
    store = FileStateStore(tmp_path, BLOCK_BYTES, 50, chunk_blocks=4)
    store.column(1)[33].fill_(9)
    seen = torch.cat([columns[1].clone() for _, columns in store.sweep()])
    assert (seen[33] == 9).all() and int(seen.sum()) == 9 * BLOCK_BYTES[1]


def test_memory_does_not_grow_with_the_file(tmp_path):
    small = FileStateStore(tmp_path, [512], 10_000, chunk_blocks=16)
    large = FileStateStore(tmp_path, [512], 100_000, chunk_blocks=16)
    for store in (small, large):
        assert sum(part.nbytes for buffer in store._buffers for part in buffer) == 4 * 16 * 512


def test_no_file_is_left_behind(tmp_path):
    store = FileStateStore(tmp_path, BLOCK_BYTES, 50, chunk_blocks=4)
    assert store.num_bytes > 0 and os.listdir(tmp_path) == []


def test_a_missing_directory_is_named(tmp_path):
    with pytest.raises(ConfigError, match="nowhere: No such file") as caught:
        FileStateStore(tmp_path / "nowhere", BLOCK_BYTES, 5, chunk_blocks=4)
    assert "--optimizer-offload-path" in caught.value.flags


def test_a_full_disk_is_told_before_anything_runs(tmp_path):
    free = os.statvfs(tmp_path)
    too_many = free.f_bavail * free.f_frsize // 512 + 2**21
    with pytest.raises(ConfigError, match=r"needs [\d,]+ MiB for this rank .* which has [\d,]+"):
        FileStateStore(tmp_path, [512], too_many, chunk_blocks=2**24)
    assert os.listdir(tmp_path) == []


def test_host_memory_that_does_not_suffice_is_refused_with_numbers():
    assert host_memory_problem(90, "state", available=100) is None
    problem = host_memory_problem(60 << 20, "state", num_local_ranks=2, available=100 << 20)
    assert problem is not None
    assert "60 MiB per rank, 120 MiB for the 2 ranks" in problem.found
    assert "100 MiB left" in problem.found
    assert "--optimizer-offload-path" in problem.fix


def write(path, text):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)


def test_the_tightest_of_machine_and_cgroups_counts(tmp_path):
    mib = 2**20
    write(tmp_path / "proc/meminfo", "MemTotal: 9000000 kB\nMemAvailable: 4096000 kB\n")
    assert available_host_bytes(tmp_path) == 4000 * mib
    write(tmp_path / "proc/self/cgroup", "0::/job/step\n")
    group = tmp_path / "sys/fs/cgroup/job"
    write(group / "memory.max", f"{3000 * mib}\n")
    write(group / "memory.current", f"{2000 * mib}\n")
    write(group / "memory.stat", f"anon 5\ninactive_file {400 * mib}\nactive_file {100 * mib}\n")
    # The cache of 500 MiB is given back on demand.
    assert available_host_bytes(tmp_path) == 1500 * mib
    write(group / "step/memory.max", "max\n")
    write(group / "step/memory.current", "0\n")
    write(group / "step/memory.stat", "anon 5\n")
    assert available_host_bytes(tmp_path) == 1500 * mib


def test_an_unknown_machine_is_not_refused(tmp_path):
    assert available_host_bytes(tmp_path) is None
