"""Shard files hold the bytes that were put, whichever way these went to the disk."""

from __future__ import annotations

import contextlib
import errno
import hashlib
import os
import random
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from pathlib import Path

import pytest
import torch

from megatron.core.dist_checkpointing.durable import DamagedCheckpointError, open_file
from megatron.core.dist_checkpointing.durable_file import DurableFile
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

O_DIRECT = getattr(os, "O_DIRECT", 0)


class Calls:
    """Watches and changes the calls that open and write files."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.direct: set[int] = set()
        self.direct_bytes = self.cached_bytes = 0
        self.refuses_to_open = self.refuses_to_write = self.takes_half = False
        self.fails_after = 10**9
        self._open, self._pwrite = os.open, os.pwrite
        monkeypatch.setattr(os, "open", self.open)
        monkeypatch.setattr(os, "pwrite", self.pwrite)

    def open(self, path, flags: int, mode: int = 0o777, **more) -> int:
        if flags & O_DIRECT and self.refuses_to_open:
            raise OSError(errno.EINVAL, "no direct writes here")
        descriptor = self._open(path, flags, mode, **more)
        (self.direct.add if flags & O_DIRECT else self.direct.discard)(descriptor)
        return descriptor

    def pwrite(self, descriptor: int, data, position: int) -> int:
        self.fails_after -= 1
        if self.fails_after < 0:
            raise OSError(errno.ENOSPC, "full")
        if descriptor in self.direct and self.refuses_to_write:
            raise OSError(errno.EINVAL, "no direct writes here")
        if self.takes_half and len(data) > 1:
            data = data[: len(data) // 2]
        count = self._pwrite(descriptor, data, position)
        if descriptor in self.direct:
            self.direct_bytes += count
        else:
            self.cached_bytes += count
        return count


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> Calls:
    return Calls(monkeypatch)


def refuse_to_open(calls: Calls) -> None:
    calls.refuses_to_open = True


def refuse_to_write(calls: Calls) -> None:
    calls.refuses_to_write = True


def take_half(calls: Calls) -> None:
    calls.takes_half = True


WAYS: list[Callable[[Calls], None]] = [
    lambda calls: None, refuse_to_open, refuse_to_write, take_half
]  # fmt: skip


@contextlib.contextmanager
def stream_of_three(path: Path) -> Iterator[Sink]:
    with open(path, "xb") as file, StreamSink(file.write, 3) as sink:
        yield sink


@pytest.mark.parametrize("in_background", [False, True])
@pytest.mark.parametrize("way", WAYS)
def test_a_file_holds_what_was_put(way, in_background: bool, calls: Calls, tmp_path: Path) -> None:
    way(calls)
    chance = random.Random(5)
    sizes = [0, 1, 8, PAGE_BYTES, BLOCK_BYTES, BLOCK_BYTES, *(chance.choices(range(9000), k=40))]
    sizes += [BLOCK_BYTES - 1, 3 * PAGE_BYTES + 5, BLOCK_BYTES]
    parts = [chance.randbytes(size) for size in sizes]
    with DurableFile(tmp_path / "f", sum(sizes[:-1]), in_background=in_background) as file:
        hashes = []
        for part in parts:
            hashes.append(file.put(part))
            if chance.random() < 0.1:
                file.begin()
        file.finish()
    assert (tmp_path / "f").read_bytes() == b"".join(parts)
    assert [h.result() for h in hashes] == [hashlib.sha256(part).hexdigest() for part in parts]


def test_all_but_the_ends_goes_past_the_page_cache_where_the_disk_can(calls, tmp_path) -> None:
    if not O_DIRECT:
        return
    with DurableFile(tmp_path / "f", 3 * BLOCK_BYTES) as file:
        for _ in range(3):
            file.put(b"\1" * (BLOCK_BYTES - 8))
        file.finish()
    assert calls.direct_bytes + calls.cached_bytes == 3 * (BLOCK_BYTES - 8)
    assert calls.cached_bytes < 9 * PAGE_BYTES or not calls.direct


@pytest.mark.parametrize("way", WAYS[:2])
def test_a_write_that_fails_is_raised_and_ends_the_rest(way, calls: Calls, tmp_path: Path) -> None:
    way(calls)
    calls.fails_after = 3

    def fill() -> None:
        with DurableFile(tmp_path / "f", 0) as file:
            for _ in range(8):
                file.put(bytes(BLOCK_BYTES))
            file.finish()

    with pytest.raises(OSError, match="full"):
        fill()


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
