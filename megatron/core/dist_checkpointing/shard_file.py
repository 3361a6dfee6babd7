"""Files of raw tensors in the safetensors layout, hashed from the bytes as they are written.

    8 bytes, little-endian: length of the header
    header: {"__metadata__": {...}, name: {"dtype", "shape", "data_offsets": [begin, end]}, ...}
    data, without holes

Any safetensors reader opens such a file; this module needs none to write or read it. Hashes are
taken block by block from the memory that is handed to write(): re-reading would bless a
corruption that came before it. A block is the unit of verification, so reading a slice of a large
shard hashes little more than the slice.
"""

from __future__ import annotations

import contextlib
import ctypes
import hashlib
import json
import math
import os
import struct
import sys
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, wait
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from megatron.core.dist_checkpointing.durable import (
    DamagedCheckpointError,
    OpenFile,
    free_bytes,
    write_all,
)
from megatron.core.dist_checkpointing.object_store import Place
from megatron.core.dist_checkpointing.work_threads import WorkThreads
from megatron.core.errors import CheckpointError

BLOCK_BYTES = 4 << 20
"""Unit of hashing within a shard; a multiple of every element size."""
HASH_NAME = "sha256"
"""1.5 to 2 GB/s per core with SHA instructions (all recent servers); several threads hash while
others write or read. Of what every Python has it is also the fastest, before BLAKE2 and CRC-32's
equal; and one hash, that of the manifest, pins a whole checkpoint against substitution."""
_WRITEBACK_BYTES = 16 << 20
"""The disk is set to work each time so much has been written."""
_PIECE_BYTES = 1 << 20
"""What is hashed and then written at once; the cache of a core holds it."""
_INLINE_BYTES = 64 << 10
"""A smaller block is hashed at once: handing it to a thread would take as long."""
_START_WRITING = 2
"""SYNC_FILE_RANGE_WRITE of Linux."""


def _find_sync_file_range() -> Callable[[int, int, int, int], int] | None:
    """Return a call of Linux that Python does not have; None elsewhere."""
    if sys.platform != "linux":
        return None
    try:
        found = ctypes.CDLL(None).sync_file_range
    except (OSError, AttributeError):
        return None
    found.argtypes = (ctypes.c_int, ctypes.c_int64, ctypes.c_int64, ctypes.c_uint)
    call: Callable[[int, int, int, int], int] = found
    return call


_SYNC_FILE_RANGE = _find_sync_file_range()

_NAMES: dict[torch.dtype, str] = {
    torch.float64: "F64", torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16",
    torch.int64: "I64", torch.int32: "I32", torch.int16: "I16", torch.int8: "I8",
    torch.uint8: "U8", torch.bool: "BOOL", torch.uint16: "U16", torch.uint32: "U32",
    torch.uint64: "U64", torch.float8_e4m3fn: "F8_E4M3", torch.float8_e5m2: "F8_E5M2",
}  # fmt: skip
DTYPES: dict[str, torch.dtype] = {name: dtype for dtype, name in _NAMES.items()}
"""Safetensors dtype names."""


def dtype_name(dtype: torch.dtype) -> str:
    """Return the safetensors name of a dtype, or refuse it."""
    if dtype not in _NAMES:
        raise CheckpointError(
            f"a tensor of dtype {dtype} cannot be stored.",
            rule=f"stored dtypes are {', '.join(sorted(DTYPES))}",
        )
    return _NAMES[dtype]


def element_bytes(name: str) -> int:
    """Return the size of one element of a safetensors dtype."""
    return DTYPES[name].itemsize


def hash_of(data: bytes | memoryview) -> str:
    """Return the hash of bytes, as hexadecimal text."""
    return hashlib.new(HASH_NAME, data).hexdigest()


def as_bytes(tensor: Tensor) -> memoryview:
    """Return the memory of a contiguous CPU tensor; nothing is copied."""
    if tensor.numel() == 0:
        return memoryview(b"")
    return tensor.detach().reshape(-1).view(torch.uint8).numpy().data


@dataclass(frozen=True)
class StoredShard:
    """One tensor of a file: where its bytes are and what they must hash to."""

    name: str
    begin: int
    """Position of the first byte in the file."""
    num_bytes: int
    hashes: tuple[str, ...]
    """One per block of BLOCK_BYTES, the last one shorter."""


@dataclass(frozen=True)
class StoredFile:
    """What one write produced."""

    name: str
    size: int
    header_size: int
    """Bytes before the first shard."""
    header_hash: str
    shards: tuple[StoredShard, ...]


def build_header(
    tensors: Sequence[tuple[str, str, Sequence[int]]], metadata: dict[str, str]
) -> bytes:
    """Return the length field and header for tensors (name, dtype name, shape) stored in order."""
    entries: dict[str, Any] = {"__metadata__": metadata}
    position = 0
    for name, dtype, shape in tensors:
        end = position + math.prod(shape) * element_bytes(dtype)
        assert name not in entries, f"two tensors of one file are called {name!r}"
        entries[name] = {"dtype": dtype, "shape": list(shape), "data_offsets": [position, end]}
        position = end
    text = json.dumps(entries, separators=(",", ":")).encode("ascii")
    text += b" " * (-len(text) % 8)  # data begins at a multiple of 8
    return struct.pack("<Q", len(text)) + text


def storage_order(dtypes: Sequence[str]) -> list[int]:
    """Return the storage order: wide elements first, so that all are aligned."""
    return sorted(range(len(dtypes)), key=lambda i: -element_bytes(dtypes[i]))


@dataclass(frozen=True)
class Sink:
    """Where the bytes of a file go, one piece after another."""

    write: Callable[[memoryview | bytes], object]
    finish: Callable[[], None]
    """Called once, after the last byte."""


@contextlib.contextmanager
def durable_sink(path: Path) -> Iterator[Sink]:
    """Open a new file; what was written is on the disk when `finish` returns.

    Raises:
        OSError: the system refused.
    """
    position = started = 0
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o644)

    def write(data: memoryview | bytes) -> None:
        nonlocal position, started
        write_all(descriptor, data)
        position += len(data)
        if position - started >= _WRITEBACK_BYTES:
            _start_writeback(descriptor, started, position - started)
            started = position

    try:
        yield Sink(write, lambda: os.fsync(descriptor))
    finally:
        os.close(descriptor)


def write_shards(
    file_name: str,
    tensors: Sequence[tuple[str, Tensor]],
    metadata: dict[str, str],
    *,
    sink: Sink,
    num_threads: int,
) -> StoredFile:
    """Pass the bytes of a shard file to `sink`, and hash them on the way.

    This thread hashes what it writes, a piece that fits into the cache at a time: the copy into the
    page cache then finds it there. Other threads hash whole blocks ahead of it.

    Args:
        tensors: (name, tensor) in `storage_order`; on any device, of any strides. One that is
            not contiguous on the CPU is copied there, at most two at a time.
        metadata: text facts for the file's header.
        sink: finished while hashing may still go on.
        num_threads: how many hash, with this one.
    """
    header = build_header([(n, dtype_name(t.dtype), tuple(t.shape)) for n, t in tensors], metadata)
    placed: list[tuple[str, int, int, list[Future[str]]]] = []
    copied: list[Future[str]] = []
    position = len(header)
    with WorkThreads(num_threads - 1) as threads:
        hashing = _Hashing(threads, num_threads - 1, sink)
        sink.write(header)
        for name, tensor in tensors:
            on_host = tensor.detach().to("cpu").contiguous()
            data = as_bytes(on_host)
            hashes = []
            for begin in range(0, len(data), BLOCK_BYTES):
                hashes.append(hashing.write(data[begin : begin + BLOCK_BYTES]))
            placed.append((name, position, len(data), hashes))
            position += len(data)
            if on_host.data_ptr() != tensor.data_ptr():
                wait(copied)
                copied = hashes
        sink.finish()
    shards = (
        StoredShard(name, begin, num_bytes, tuple(h.result() for h in hashes))
        for name, begin, num_bytes, hashes in placed
    )
    return StoredFile(file_name, position, len(header), hash_of(header), tuple(shards))


class _Hashing:
    """Writes blocks in order; each is hashed here, or by a helper that has nothing left to do."""

    def __init__(self, threads: WorkThreads, num_helpers: int, sink: Sink) -> None:
        self._threads, self._sink = threads, sink
        # One block in work and one in waiting keep a helper busy.
        self._helped: list[Future[str] | None] = [None] * (2 * num_helpers)

    def write(self, block: memoryview) -> Future[str]:
        """Write a block and return what will be its hash."""
        if len(block) >= _INLINE_BYTES:
            for place, earlier in enumerate(self._helped):
                if earlier is None or earlier.done():
                    found: Future[str] = self._threads.start(hash_of, block)
                    self._helped[place] = found
                    self._sink.write(block)
                    return found
        state, done = hashlib.new(HASH_NAME), Future[str]()
        for begin in range(0, len(block), _PIECE_BYTES):
            piece = block[begin : begin + _PIECE_BYTES]
            state.update(piece)
            self._sink.write(piece)
        done.set_result(state.hexdigest())
        return done


def _start_writeback(descriptor: int, begin: int, num_bytes: int) -> None:
    """Let the disk begin with what is written, so that fsync finds little left to do.

    It is a hint; a file system that refuses it is only slower. `posix_fadvise(DONTNEED)` starts
    the disk too, but also looks for pages to drop, of which there are none yet: measured, writing
    takes half as much processor time again.
    """
    if _SYNC_FILE_RANGE is not None:
        _SYNC_FILE_RANGE(descriptor, begin, num_bytes, _START_WRITING)


def read_block(file: OpenFile, into: memoryview, position: int, expected: str, path: Place) -> None:
    """Read a block into memory and verify it while it is in the cache.

    Args:
        into: as long as the block.
        position: of the block in the file.
        expected: its hash.
    """
    file.read_into(into, position)
    if hash_of(into) != expected:
        raise DamagedCheckpointError(
            f"{path} is corrupt: bytes {position} to {position + len(into) - 1} are not those "
            "that were written.",
            rule=f"every block read must have the {HASH_NAME} recorded in manifest.json",
            fix="use another checkpoint; check the storage",
        )


def start_reading(
    threads: WorkThreads,
    file: OpenFile,
    into: memoryview,
    position: int,
    hashes: Sequence[str],
    path: Place,
) -> list[Future]:
    """Let threads read whole blocks into memory and verify each.

    Args:
        into: as long as the blocks together; only the last may be shorter than BLOCK_BYTES.
        position: of the first block in the file.
        hashes: of the blocks.
    Returns:
        what to wait for before the bytes are used; each may raise `CheckpointError`.
    """
    if len(into) < _INLINE_BYTES and len(hashes) == 1:
        read_block(file, into, position, hashes[0], path)
        return []
    return [
        threads.start(
            read_block,
            file,
            into[index * BLOCK_BYTES : (index + 1) * BLOCK_BYTES],
            position + index * BLOCK_BYTES,
            expected,
            path,
        )
        for index, expected in enumerate(hashes)
    ]


def room_for(path: Path, num_bytes: int) -> CheckpointError | None:
    """Return the problem if the file system of `path` has no room for `num_bytes`."""
    free = free_bytes(path)
    if num_bytes <= free:
        return None
    return CheckpointError(
        f"ENOSPC before writing {path}: need={num_bytes} bytes have={free} bytes.",
        rule="a checkpoint is started only if it fits",
        flags=["--save"],
        fix="free space on that file system, or keep fewer checkpoints (--most-recent-k)",
    )
