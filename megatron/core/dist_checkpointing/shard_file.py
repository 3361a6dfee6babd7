"""Files of raw tensors in the safetensors layout, hashed from the bytes as they are written.

    8 bytes, little-endian: length of the header
    header: {"__metadata__": {...}, name: {"dtype", "shape", "data_offsets": [begin, end]}, ...}
    data, without holes, from a multiple of 4096 on

Any safetensors reader opens such a file; this module needs no library to write or read it. Hashes
are computed block by block from the memory that is passed to the system: hashing a file after
reading it back would accept an earlier corruption. A block is the unit of verification, so reading
a slice of a large shard hashes little more than the slice.
"""

from __future__ import annotations

import hashlib
import json
import math
import struct
from collections.abc import Callable, Sequence
from concurrent.futures import Future, wait
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from megatron.core.dist_checkpointing.durable import (
    DamagedCheckpointError,
    OpenFile,
)
from megatron.core.dist_checkpointing.object_store import StoragePath
from megatron.core.dist_checkpointing.thread_pool import ThreadPool
from megatron.core.foundation.errors import CheckpointError

BLOCK_BYTES = 4 << 20
"""Unit of hashing within a shard; a multiple of every element size."""
PAGE_BYTES = 4096
"""Data begins at a multiple of it, tensors of whole pages are first: aligned writes are fast."""
HASH_NAME = "sha256"
"""1.5 to 2 GB/s per core with SHA instructions (all recent servers); several threads hash while
others write or read. It is also the fastest hash in every Python: faster than BLAKE2 and as fast as
CRC-32. And the hash of the manifest alone protects a whole checkpoint against substitution."""

_NAMES: dict[torch.dtype, str] = {
    torch.float64: "F64", torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16",
    torch.int64: "I64", torch.int32: "I32", torch.int16: "I16", torch.int8: "I8",
    torch.uint8: "U8", torch.bool: "BOOL", torch.uint16: "U16", torch.uint32: "U32",
    torch.uint64: "U64", torch.float8_e4m3fn: "F8_E4M3", torch.float8_e5m2: "F8_E5M2",
    torch.float8_e8m0fnu: "F8_E8M0",
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
    """One tensor of a file: the position of its bytes and their hashes."""

    name: str
    begin: int
    """Position of the first byte in the file."""
    num_bytes: int
    hashes: tuple[str, ...]
    """One per block of BLOCK_BYTES, the last one shorter."""


@dataclass(frozen=True)
class StoredFile:
    """The result of writing a shard file."""

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
    text += b" " * (-(8 + len(text)) % PAGE_BYTES)
    return struct.pack("<Q", len(text)) + text


def storage_order(dtypes: Sequence[str], num_bytes: Sequence[int]) -> list[int]:
    """Return the storage order: whole pages first, then wide elements, so that all are aligned."""
    return sorted(
        range(len(dtypes)),
        key=lambda i: (num_bytes[i] % PAGE_BYTES != 0, -element_bytes(dtypes[i])),
    )


class Sink(Protocol):
    """Receives the bytes of a file, one piece after another."""

    def put(self, data: memoryview | bytes) -> Future[str]:
        """Take the next bytes, at most a block, and return the future of their hash."""
        ...

    def begin(self) -> None:
        """Begin to write all bytes passed so far: a wait for a hash may follow."""
        ...

    def finish(self) -> None:
        """Return when all bytes are stored. Called once, after the last byte."""
        ...


def header_of(tensors: Sequence[tuple[str, Tensor]], metadata: dict[str, str]) -> bytes:
    """Return the length field and header of a file of tensors (name, tensor), in order."""
    return build_header([(n, dtype_name(t.dtype), tuple(t.shape)) for n, t in tensors], metadata)


def write_shards(
    file_name: str, header: bytes, tensors: Sequence[tuple[str, Tensor]], sink: Sink
) -> StoredFile:
    """Pass the bytes of a shard file to `sink`, which hashes and stores them.

    Args:
        header: result of `header_of` for these tensors.
        tensors: (name, tensor) in `storage_order`; on any device, with any strides. A tensor that
            is not contiguous on the CPU is copied there, at most two large ones at a time.
        sink: finished when this returns.
    """
    placed: list[tuple[str, int, int, list[Future[str]]]] = []
    copies = _Copies(sink)
    for begin in range(0, len(header), BLOCK_BYTES):
        sink.put(header[begin : begin + BLOCK_BYTES])
    position = len(header)
    for name, tensor in tensors:
        on_host = tensor.detach().to("cpu").contiguous()
        data = as_bytes(on_host)
        hashes = [sink.put(data[b : b + BLOCK_BYTES]) for b in range(0, len(data), BLOCK_BYTES)]
        placed.append((name, position, len(data), hashes))
        position += len(data)
        if on_host.data_ptr() != tensor.data_ptr():
            copies.hold(hashes, len(data))
    sink.finish()
    shards = (
        StoredShard(name, begin, num_bytes, tuple(h.result() for h in hashes))
        for name, begin, num_bytes, hashes in placed
    )
    return StoredFile(file_name, position, len(header), hash_of(header), tuple(shards))


class _Copies:
    """Bounds the host memory of copies that are not stored yet."""

    def __init__(self, sink: Sink) -> None:
        self._sink = sink
        self._earlier: list[Future[str]] = []
        self._held: list[Future[str]] = []
        self._num_bytes = 0

    def hold(self, hashes: Sequence[Future[str]], num_bytes: int) -> None:
        """Count a copy; if many copies are not stored yet, wait for the earlier ones."""
        self._held += hashes
        self._num_bytes += num_bytes
        if self._num_bytes >= BLOCK_BYTES:
            self._sink.begin()
            wait(self._earlier)
            self._earlier, self._held, self._num_bytes = self._held, [], 0


class StreamSink:
    """Passes bytes on in order, while threads hash them. Use as a context manager.

    Args:
        write: takes the next bytes of the file.
    """

    def __init__(self, write: Callable[[memoryview | bytes], object], num_threads: int = 1) -> None:
        self._write = write
        self._threads = ThreadPool(num_threads)

    def __enter__(self) -> StreamSink:
        return self

    def __exit__(self, *_: object) -> None:
        self._threads.__exit__()

    def put(self, data: memoryview | bytes) -> Future[str]:
        found = self._threads.start(hash_of, data)
        self._write(data)
        return found

    def begin(self) -> None:
        pass

    def finish(self) -> None:
        pass


def read_block(
    file: OpenFile, into: memoryview, position: int, expected: str, path: StoragePath
) -> None:
    """Read a block into memory and verify it while it is in the cache.

    Args:
        into: as long as the block.
        position: position of the block in the file.
        expected: its hash.
    """
    file.read_into(into, position)
    if hash_of(into) != expected:
        raise DamagedCheckpointError(
            f"{path} is corrupt: bytes {position} to {position + len(into) - 1} differ from the "
            "bytes that were written.",
            rule=f"every block read must have the {HASH_NAME} recorded in manifest.json",
            fix="use another checkpoint; check the storage",
        )
