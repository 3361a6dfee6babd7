"""Write a checkpoint from full tensors that are produced one after another, outside of a run.

It needs one process, and as much memory as the largest file. Tools that rewrite checkpoints use it.
"""

from __future__ import annotations

import secrets
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from megatron.core.dist_checkpointing.flat_ranges import describe_box
from megatron.core.dist_checkpointing.loader import Contents, SliceReader, read_box
from megatron.core.dist_checkpointing.manifest import (
    COMMON_NAME,
    ManifestFile,
    Shard,
    StoredTensor,
    build_manifest,
)
from megatron.core.dist_checkpointing.object_store import StoragePath
from megatron.core.dist_checkpointing.shard_file import (
    DTYPES,
    element_bytes,
    hash_of,
    storage_order,
)
from megatron.core.dist_checkpointing.shard_plan import ShardIndex
from megatron.core.dist_checkpointing.typed_json import dump_bytes
from megatron.core.dist_checkpointing.writer import writer_for


@dataclass(frozen=True)
class Produced:
    """A tensor to be written: its description, and a function that returns its data."""

    dtype: str
    shape: tuple[int, ...]
    is_padded: bool
    produce: Callable[[], Tensor]

    @property
    def num_bytes(self) -> int:
        """Size of the tensor."""
        return torch.Size(self.shape).numel() * element_bytes(self.dtype)


def read_full(tensor: StoredTensor, reader: SliceReader) -> Tensor:
    """Return a stored tensor, joined to its full shape [...] and verified; on the CPU."""
    full = torch.empty(tensor.shape, dtype=DTYPES[tensor.dtype])
    read_box(ShardIndex(tensor), ((0,) * len(tensor.shape), tensor.shape), reader, full)
    return full


def plain_state(contents: Contents) -> dict[str, Any]:
    """Return the JSON form of all that is not a tensor, as common.json holds it."""
    return {"common": contents.common, "objects": contents.objects}


def full_tensors(
    contents: Contents, *, with_optimizer: bool = True
) -> Iterator[tuple[str, Tensor]]:
    """Yield the key and the full tensor [...], on the CPU, of all that is stored, one by one."""
    with contents.open_reader() as reader:
        for key, stored in contents.manifest.tensors.items():
            if with_optimizer or not key.startswith("optimizer."):
                yield key, read_full(stored, reader)


def state_bytes(contents: Contents) -> bytes:
    """Return all that is not a tensor as JSON; `ContentsBuilder.finish_own` reads it."""
    return dump_bytes({**plain_state(contents), "info": dict(contents.manifest.info)})


def write_full_tensors(
    final: StoragePath,
    tensors: Mapping[str, Produced],
    plain: Mapping[str, object],
    info: Mapping[str, object],
    *,
    num_files: int,
) -> None:
    """Write and commit a checkpoint of full tensors.

    Args:
        final: the checkpoint, for example OUT/iter_0000010; replaced if it exists.
        plain: see `plain_state`.
        num_files: the tensors are balanced over so many files.
    Raises:
        CheckpointError: the storage failed; all files are removed.
    """
    run, common = secrets.token_hex(6), dump_bytes(plain)
    files = {COMMON_NAME: ManifestFile(len(common), hash_of(common))}
    shards: dict[str, list[Shard]] = {key: [] for key in tensors}
    writer = writer_for(final, run)
    writer.prepare(sum(t.num_bytes for t in tensors.values()) + len(common))
    try:
        for number, keys in enumerate(_balanced(tensors, num_files)):
            name = f"__{number}_0.safetensors"
            stored = writer.write(
                name,
                [(key + describe_box(_whole(tensors[key])), tensors[key].produce())
                 for key in keys],
                {"format": "pt", "checkpoint": final.name, "run": run},
            )  # fmt: skip
            files[name] = ManifestFile.of(stored)
            for key, shard in zip(keys, stored.shards, strict=True):
                shards[key].append(Shard(*_whole(tensors[key]), name, shard.begin, shard.hashes))
        described = {k: (t.dtype, t.shape, t.is_padded) for k, t in tensors.items()}
        writer.commit(common, build_manifest(final.name, run, files, described, shards, info))
    except BaseException:
        writer.abort()
        raise


def _whole(tensor: Produced) -> tuple[tuple[int, ...], tuple[int, ...]]:
    return (0,) * len(tensor.shape), tensor.shape


def _balanced(tensors: Mapping[str, Produced], num_files: int) -> list[list[str]]:
    """Distribute the bytes evenly over files; return the keys of each in storage order."""
    loads, parts = [0] * num_files, [list[str]() for _ in range(num_files)]
    for key in sorted(tensors, key=lambda k: (-tensors[k].num_bytes, k)):
        lightest = loads.index(min(loads))
        parts[lightest].append(key)
        loads[lightest] += tensors[key].num_bytes
    ordered = []
    for keys in filter(None, parts):
        keys.sort()
        sizes = [tensors[k].num_bytes for k in keys]
        order = storage_order([tensors[k].dtype for k in keys], sizes)
        ordered.append([keys[i] for i in order])
    return ordered
