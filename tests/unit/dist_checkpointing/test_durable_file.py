"""Shard files hold the bytes that were put, whichever way these went to the disk."""

import contextlib
import errno
import hashlib
import os
import random
from collections.abc import Iterator
from concurrent.futures import Future
from pathlib import Path

import pytest
import torch

from megatron.core.dist_checkpointing.durable import DamagedCheckpointError, open_file
from megatron.core.dist_checkpointing.shard_file import (
    BLOCK_BYTES,
    PAGE_BYTES,
    Sink,
    StreamSink,
    as_bytes,
    header_of,
    read_block,
    write_shards,
)
from megatron.core.dist_checkpointing.thread_pool import threads_per_rank
from megatron.core.dist_checkpointing.writer import WINDOW_BYTES, DurableFile


class Writes:
    """Watches and changes the calls that write files."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.takes_half = False
        self.fails_after = 10**9
        self.places: list[tuple[int, int]] = []
        self._pwrite = os.pwrite
        monkeypatch.setattr(os, "pwrite", self.pwrite)

    def pwrite(self, descriptor: int, data, position: int) -> int:
        self.fails_after -= 1
        if self.fails_after < 0:
            raise OSError(errno.ENOSPC, "full")
        if self.takes_half and len(data) > 1:
            data = data[: len(data) // 2]
        self.places.append((position, len(data)))
        return self._pwrite(descriptor, data, position)


@pytest.fixture
def writes(monkeypatch: pytest.MonkeyPatch) -> Writes:
    return Writes(monkeypatch)


@contextlib.contextmanager
def stream_of_three(path: Path) -> Iterator[Sink]:
    with open(path, "xb") as file, StreamSink(file.write, 3) as sink:
        yield sink


@pytest.mark.parametrize("in_background", [False, True])
@pytest.mark.parametrize("takes_half", [False, True])
def test_a_file_holds_what_was_put(takes_half, in_background, writes: Writes, tmp_path) -> None:
    writes.takes_half = takes_half
    chance = random.Random(5)
    sizes = [0, 1, 8, PAGE_BYTES, BLOCK_BYTES, BLOCK_BYTES, *(chance.choices(range(9000), k=40))]
    sizes += [BLOCK_BYTES - 1, 3 * PAGE_BYTES + 5, BLOCK_BYTES]
    parts = [chance.randbytes(size) for size in sizes]
    with DurableFile(tmp_path / "f", sum(sizes), in_background=in_background) as file:
        hashes = []
        for part in parts:
            hashes.append(file.put(part))
            if chance.random() < 0.1:
                file.begin()
        file.finish()
    assert (tmp_path / "f").read_bytes() == b"".join(parts)
    assert [h.result() for h in hashes] == [hashlib.sha256(part).hexdigest() for part in parts]
    assert all(at // WINDOW_BYTES == (at + size - 1) // WINDOW_BYTES for at, size in writes.places)


def test_a_write_that_fails_is_raised_and_ends_the_rest(writes: Writes, tmp_path: Path) -> None:
    writes.fails_after = 3

    def fill() -> None:
        with DurableFile(tmp_path / "f", 8 * BLOCK_BYTES) as file:
            for _ in range(8):
                file.put(bytes(BLOCK_BYTES))
            file.finish()

    with pytest.raises(OSError, match="full"):
        fill()
    assert len(writes.places) <= 3


def test_an_error_of_the_writer_itself_leaves_nothing_running(tmp_path: Path) -> None:
    before = set(os.listdir("/proc/self/fd")) if os.path.exists("/proc/self/fd") else set()

    def give_up() -> None:
        with DurableFile(tmp_path / "f", BLOCK_BYTES) as file:
            file.put(bytes(BLOCK_BYTES))
            raise RuntimeError("of the model")

    with pytest.raises(RuntimeError, match="of the model"):
        give_up()
    if before:
        assert set(os.listdir("/proc/self/fd")) == before
    with pytest.raises(FileExistsError):
        DurableFile(tmp_path / "f", 0).__enter__()


@pytest.mark.parametrize("sink", [lambda path: DurableFile(path, 0), stream_of_three])
def test_hashes_are_those_of_the_blocks(sink, tmp_path: Path) -> None:
    tensors = [
        ("long", torch.arange(3 * BLOCK_BYTES // 4 + 5, dtype=torch.int32)),
        ("strided", torch.arange(BLOCK_BYTES // 2, dtype=torch.int32).view(64, -1).t()),
        ("empty", torch.empty(0)),
        ("small", torch.ones(3, dtype=torch.bfloat16)),
    ]
    with sink(tmp_path / "f") as opened:
        stored = write_shards("f", header_of(tensors, {}), tensors, opened)
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


def test_copies_of_tensors_that_are_not_contiguous_are_few_at_a_time(tmp_path: Path) -> None:
    alive: list[int] = []

    class Counting:
        """Stores nothing until it is asked to, as a slow disk does."""

        def __init__(self) -> None:
            self.waiting: list = []

        def put(self, data):
            found: Future[str] = Future()
            self.waiting.append((found, len(data)))
            alive.append(sum(size for _, size in self.waiting))
            return found

        def begin(self) -> None:
            for found, _ in self.waiting:
                found.set_result("")
            self.waiting = []

        finish = begin

    strided = [(f"t{i}", torch.zeros(512, 2048).t()) for i in range(12)]
    write_shards("f", header_of(strided, {}), strided, Counting())
    assert max(alive) <= 2 * BLOCK_BYTES


@pytest.mark.parametrize(
    ("ranks", "cores", "expected"),
    [("1", 2, 2), ("2", 2, 1), ("8", 2, 1), ("8", 192, 4), ("many", 3, 3), ("0", 3, 3)],
)
def test_ranks_of_a_machine_share_its_cores(ranks, cores, expected, monkeypatch) -> None:
    monkeypatch.setenv("LOCAL_WORLD_SIZE", ranks)
    monkeypatch.setattr("os.sched_getaffinity", lambda pid: set(range(cores)), raising=False)
    assert threads_per_rank() == expected
