"""Read boxes of stored shards into tensors, verifying every block that is touched."""

from __future__ import annotations

import contextlib
import math
from concurrent.futures import Future, wait

import torch
from torch import Tensor

from megatron.core.dist_checkpointing.durable import OpenFile, open_file
from megatron.core.dist_checkpointing.flat_ranges import Box
from megatron.core.dist_checkpointing.manifest import Manifest, Shard, StoredTensor, read_header
from megatron.core.dist_checkpointing.object_store import StoragePath
from megatron.core.dist_checkpointing.shard_file import (
    BLOCK_BYTES,
    DTYPES,
    as_bytes,
    read_block,
)
from megatron.core.dist_checkpointing.shard_plan import ReadItem
from megatron.core.dist_checkpointing.thread_pool import ThreadPool, threads_per_rank
from megatron.core.foundation.device import is_host_memory

_INLINE_BYTES = 64 << 10
"""A smaller block is read at once: passing it to a thread would take as long."""
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
        if (
            read.in_shard[1] == shard.shape
            and is_host_memory(into.device)
            and into.dtype == DTYPES[tensor.dtype]
            and into.is_contiguous()
        ):
            self._pending += self._start_blocks(shard, as_bytes(into), 0)
        elif math.prod(shard.shape) > 0:
            self._read_slabs(tensor, shard, read.in_shard, into)

    def _start_blocks(self, shard: Shard, into: memoryview, first_block: int) -> list[Future]:
        """Read whole blocks of a shard into memory and verify each, in threads.

        Args:
            into: as long as the blocks together.
        Returns:
            futures to wait for before the bytes are used; each may raise `CheckpointError`.
        """
        file, path = self._open(shard.file), self.directory / shard.file
        num_blocks = -(-len(into) // BLOCK_BYTES)
        blocks = [
            (
                file,
                into[index * BLOCK_BYTES : (index + 1) * BLOCK_BYTES],
                shard.begin + (first_block + index) * BLOCK_BYTES,
                shard.hashes[first_block + index],
                path,
            )
            for index in range(num_blocks)
        ]
        self.bytes_read += len(into)
        if len(into) < _INLINE_BYTES and num_blocks == 1:
            read_block(*blocks[0])
            return []
        return [self._threads.start(read_block, *block) for block in blocks]

    def _open(self, name: str) -> OpenFile:
        """Return an open file; at first use the size and the header are verified."""
        if name not in self._files:
            file = self._stack.enter_context(open_file(self.directory, name))
            read_header(file, self.manifest, name, self.directory / name)
            self._files[name] = file
        return self._files[name]

    def _read_slabs(self, tensor: StoredTensor, shard: Shard, box: Box, into: Tensor) -> None:
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
                shard, tensor.shard_bytes(shard), first * item, end * item
            )
            flat = data[: len(data) // item * item].view(dtype)
            part = flat.as_strided(size, strides, skipped // item)
            (into.narrow(axis, row - begin, last - row) if shape else into).copy_(part)
            row = last

    def _read_blocks(
        self, shard: Shard, num_bytes: int, first: int, end: int
    ) -> tuple[Tensor, int]:
        """Read and verify the blocks around bytes first..end-1 of a shard.

        Returns:
            the bytes, and how many of them precede `first`.
        """
        low = first // BLOCK_BYTES
        begin, stop = low * BLOCK_BYTES, min(-(-end // BLOCK_BYTES) * BLOCK_BYTES, num_bytes)
        if self._scratch.numel() < stop - begin:
            self._scratch = torch.empty(stop - begin, dtype=torch.uint8)
        data = self._scratch[: stop - begin]
        pending = self._start_blocks(shard, as_bytes(data), low)
        wait(pending)
        for future in pending:
            future.result()
        return data, first - begin
