"""Read boxes of stored shards into tensors, verifying every block that is touched."""

from __future__ import annotations

import contextlib
import math
from concurrent.futures import Future, wait

import torch
from torch import Tensor

from megatron.core.dist_checkpointing.durable import (
    DamagedCheckpointError,
    OpenFile,
    open_file,
)
from megatron.core.dist_checkpointing.flat_ranges import Box
from megatron.core.dist_checkpointing.manifest import Manifest, Shard, StoredTensor
from megatron.core.dist_checkpointing.object_store import StoragePath
from megatron.core.dist_checkpointing.shard_file import (
    BLOCK_BYTES,
    DTYPES,
    as_bytes,
    hash_of,
    start_reading,
)
from megatron.core.dist_checkpointing.shard_plan import ReadItem
from megatron.core.dist_checkpointing.thread_pool import ThreadPool, threads_per_rank
from megatron.core.foundation.device import is_host_memory

SLAB_BYTES = 16 * BLOCK_BYTES
"""Most bytes read at once if a box is not stored contiguously."""


class ShardReader:
    """Reads from the files of one checkpoint, in several threads.

    Use as a context manager, from one thread.
    """

    def __init__(self, directory: StoragePath, manifest: Manifest) -> None:
        self.directory = directory
        self.manifest = manifest
        self.bytes_read = 0
        self._files: dict[str, OpenFile] = {}
        self._stack = contextlib.ExitStack()
        self._pending: list[Future] = []
        self._scratch = torch.empty(0, dtype=torch.uint8)

    def __enter__(self) -> ShardReader:
        self._threads = ThreadPool(threads_per_rank())
        self._stack.enter_context(self._threads)
        return self

    def __exit__(self, *_: object) -> None:
        wait(self._pending)  # before the files are closed
        self._stack.close()
        self._files.clear()

    def finish(self) -> None:
        """Wait for all started reads; raise the first problem."""
        pending, self._pending = self._pending, []
        wait(pending)
        for future in pending:
            future.result()

    def start(self, tensor: StoredTensor, read: ReadItem, into: Tensor) -> None:
        """Begin to fill `into`; only the blocks that hold the box are read.

        Each block is verified before it is used.
        """
        shard = read.shard
        file = self._open(shard.file)
        path = self.directory / shard.file
        is_full_shard = read.in_shard[1] == shard.shape
        if (
            is_full_shard
            and is_host_memory(into.device)
            and into.dtype == DTYPES[tensor.dtype]
            and into.is_contiguous()
        ):
            data = as_bytes(into)
            self._pending += start_reading(
                self._threads, file, data, shard.begin, shard.hashes, path
            )
            self.bytes_read += len(data)
            return
        if math.prod(shard.shape) > 0:
            self._read_slabs(file, path, tensor, shard, read.in_shard, into)

    def _open(self, name: str) -> OpenFile:
        """Return an open file; at first use the size and the header are verified."""
        if name in self._files:
            return self._files[name]
        listed, path = self.manifest.files[name], self.directory / name
        file = self._stack.enter_context(open_file(self.directory, name))
        header = bytearray(listed.header_size or 0)
        if file.size != listed.size:
            raise DamagedCheckpointError(
                f"{path} has {file.size} bytes instead of {listed.size}.",
                rule="a checkpoint file has exactly the size that its manifest records",
                fix="use another checkpoint",
            )
        file.read_into(memoryview(header), 0)
        if hash_of(bytes(header)) != listed.hash:
            raise DamagedCheckpointError(
                f"{path} is corrupt: its header is not the one that was written.",
                rule="every file must have the hash recorded in manifest.json",
                fix="use another checkpoint; check the storage",
            )
        self._files[name] = file
        return file

    def _read_slabs(
        self,
        file: OpenFile,
        path: StoragePath,
        tensor: StoredTensor,
        shard: Shard,
        box: Box,
        into: Tensor,
    ) -> None:
        """Read a box row group by row group through a scratch buffer."""
        dtype = DTYPES[tensor.dtype]
        item = dtype.itemsize
        offset, shape = box
        strides = [math.prod(shard.shape[d + 1 :]) for d in range(len(shard.shape))]
        # Rows are counted along the first axis along which the box has several elements.
        axis = next((d for d, n in enumerate(shape) if n > 1), max(len(shape) - 1, 0))
        row_bytes = (strides[axis] if strides else 1) * item
        begin, count = (offset[axis], shape[axis]) if shape else (0, 1)
        row = begin
        while row < begin + count:
            last = min(begin + count, row + max(1, SLAB_BYTES // row_bytes))
            if last < begin + count:
                # End at a block border if possible, so that no block is read twice.
                last = max(row + 1, last * row_bytes // BLOCK_BYTES * BLOCK_BYTES // row_bytes)
            corner = [row if d == axis else o for d, o in enumerate(offset)]
            size = [last - row if d == axis else n for d, n in enumerate(shape)]
            first = sum(c * s for c, s in zip(corner, strides, strict=True))
            end = 1 + sum((c + n - 1) * s for c, n, s in zip(corner, size, strides, strict=True))
            data, skipped = self._read_blocks(
                file, path, shard, tensor.shard_bytes(shard), first * item, end * item
            )
            flat = data[: len(data) // item * item].view(dtype)
            part = flat.as_strided(size, strides, skipped // item)
            (into.narrow(axis, row - begin, last - row) if shape else into).copy_(part)
            row = last

    def _read_blocks(
        self, file: OpenFile, path: StoragePath, shard: Shard, num_bytes: int, first: int, end: int
    ) -> tuple[Tensor, int]:
        """Read and verify the blocks around bytes first..end-1 of a shard.

        Returns:
            the bytes, and how many of them precede `first`.
        """
        low, high = first // BLOCK_BYTES, -(-end // BLOCK_BYTES)
        begin, stop = low * BLOCK_BYTES, min(high * BLOCK_BYTES, num_bytes)
        if self._scratch.numel() < stop - begin:
            self._scratch = torch.empty(stop - begin, dtype=torch.uint8)
        data = self._scratch[: stop - begin]
        into, hashes = as_bytes(data), shard.hashes[low:high]
        pending = start_reading(self._threads, file, into, shard.begin + begin, hashes, path)
        wait(pending)
        for future in pending:
            future.result()
        self.bytes_read += stop - begin
        return data, first - begin
