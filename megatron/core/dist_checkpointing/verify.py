"""Read every byte of a checkpoint and compare it with the manifest."""

from __future__ import annotations

import json
import os
import struct
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from megatron.core.dist_checkpointing import commit
from megatron.core.dist_checkpointing.durable import (
    DamagedCheckpointError,
    OpenFile,
    open_file,
)
from megatron.core.dist_checkpointing.flat_ranges import describe_box
from megatron.core.dist_checkpointing.manifest import (
    COMMON_NAME,
    MANIFEST_NAME,
    METADATA_NAME,
    Manifest,
    read_header,
    read_listed_file,
)
from megatron.core.dist_checkpointing.object_store import ObjectDirectory, StoragePath, storage_path
from megatron.core.dist_checkpointing.shard_file import BLOCK_BYTES, read_block
from megatron.core.dist_checkpointing.thread_pool import ThreadPool, threads_per_rank
from megatron.core.foundation.errors import CheckpointError


@dataclass
class Verification:
    """Result of a full check."""

    path: StoragePath
    num_files: int = 0
    num_bytes: int = 0
    problems: list[CheckpointError] = field(default_factory=list)
    unlisted: list[str] = field(default_factory=list)
    """Files in the directory that the manifest does not list: never opened, only reported."""


def verify_checkpoint(
    directory: str | os.PathLike[str] | ObjectDirectory, *, names: Iterable[str] | None = None
) -> Verification:
    """Verify all files of a checkpoint, or the files in `names`, in this process alone.

    Every problem is collected; nothing is raised for a damaged checkpoint.
    """
    path = storage_path(directory)
    result = Verification(path)
    try:
        manifest = commit.open_checkpoint(path)
    except CheckpointError as error:
        result.problems.append(error)
        return result
    listed = set(manifest.files) | {MANIFEST_NAME, METADATA_NAME}
    present = os.listdir(path) if isinstance(path, Path) else path.names()
    result.unlisted = sorted(set(present) - listed)
    for name in sorted(manifest.files) if names is None else names:
        try:
            if name == COMMON_NAME:
                result.num_bytes += len(read_listed_file(path, manifest, name))
            else:
                result.num_bytes += verify_shard_file(path, manifest, name)
            result.num_files += 1
        except CheckpointError as error:
            result.problems.append(error)
    return result


def verify_shard_file(directory: StoragePath, manifest: Manifest, name: str) -> int:
    """Verify header and shards of one file and return its size.

    The pages are dropped from the cache first where the system allows, so that the disk is read.

    Raises:
        CheckpointError: naming the file and the bytes that differ.
    """
    path = directory / name
    num_threads = threads_per_rank()
    with open_file(directory, name) as file, ThreadPool(num_threads) as threads:
        file.forget_cached()
        _check_header(path, read_header(file, manifest, name, path), manifest, name)
        blocks = list(_blocks_of(manifest, name))
        shares = (blocks[i::num_threads] for i in range(num_threads))
        checks = [threads.start(_check_blocks, file, path, share) for share in shares]
        for check in checks:
            check.result()
    return manifest.files[name].size


def _blocks_of(manifest: Manifest, name: str) -> Iterator[tuple[int, int, str]]:
    """Yield (position, size, hash) of every block of a file."""
    for tensor in manifest.tensors.values():
        for shard in tensor.shards:
            if shard.file == name:
                size = tensor.shard_bytes(shard)
                for index, expected in enumerate(shard.hashes):
                    done = index * BLOCK_BYTES
                    yield shard.begin + done, min(size - done, BLOCK_BYTES), expected


def _check_blocks(file: OpenFile, path: StoragePath, blocks: list[tuple[int, int, str]]) -> None:
    buffer = memoryview(bytearray(BLOCK_BYTES))
    for position, size, expected in blocks:
        read_block(file, buffer[:size], position, expected, path)


def _check_header(path: StoragePath, header: bytes, manifest: Manifest, name: str) -> None:
    """Check that the file's own header lists the same tensors and bytes as the manifest."""
    expected: dict[str, Any] = {}
    for key, tensor in manifest.tensors.items():
        for shard in tensor.shards:
            if shard.file == name:
                begin = shard.begin - len(header)
                expected[key + describe_box(shard.box)] = {
                    "dtype": tensor.dtype,
                    "shape": list(shard.shape),
                    "data_offsets": [begin, begin + tensor.shard_bytes(shard)],
                }
    try:
        (length,) = struct.unpack("<Q", header[:8])
        own = json.loads(header[8:])
        own.pop("__metadata__", None)
    except (ValueError, struct.error, AttributeError, RecursionError):
        own, length = None, -1
    if own != expected or length != len(header) - 8:
        raise DamagedCheckpointError(f"{path} is corrupt: its header contradicts {MANIFEST_NAME}.")
