"""Load a sharded state dict: each rank reads its slices from a checkpoint of any layout."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, ClassVar, Protocol

import torch
from torch import Tensor

from megatron.core.dist_checkpointing import commit, typed_json
from megatron.core.dist_checkpointing.collective import run_collectively, run_on_coordinator
from megatron.core.dist_checkpointing.durable import DamagedCheckpointError
from megatron.core.dist_checkpointing.flat_ranges import Box
from megatron.core.dist_checkpointing.manifest import (
    COMMON_NAME,
    MANIFEST_NAME,
    Manifest,
    StoredTensor,
    parse_manifest,
    read_listed_file,
)
from megatron.core.dist_checkpointing.mapping import (
    LocalNonpersistentObject,
    ShardedObject,
    ShardedStateDict,
    ShardedTensor,
    ShardedTensorFactory,
)
from megatron.core.dist_checkpointing.object_store import ObjectDirectory, StoragePath, storage_path
from megatron.core.dist_checkpointing.shard_file import DTYPES
from megatron.core.dist_checkpointing.shard_plan import ReadItem, ShardIndex
from megatron.core.dist_checkpointing.shard_reader import ShardReader
from megatron.core.dist_checkpointing.tree import ABSENT, leaves, map_leaves, merge, prune
from megatron.core.dist_checkpointing.validation import StrictHandling, apply_strictness
from megatron.core.foundation import device
from megatron.core.foundation.errors import CheckpointError
from megatron.core.transport.object_collectives import ControlGroup

logger = logging.getLogger(__name__)


class SliceReader(AbstractContextManager, Protocol):
    """Reads boxes of stored shards into tensors."""

    @property
    def bytes_read(self) -> int:
        """Bytes of tensors read so far."""
        ...

    def start(self, tensor: StoredTensor, read: ReadItem, into: Tensor) -> None:
        """Begin to fill `into`: the shape of `read`, any device, any float dtype for floats."""
        ...

    def finish(self) -> None:
        """Return when all tensors are filled."""
        ...


@dataclass
class Contents:
    """A checkpoint, opened: the manifest and the values that are not tensors."""

    directory: StoragePath
    manifest: Manifest
    common: Any
    """JSON form."""
    objects: dict[str, Any]
    """unique key -> JSON form."""

    reads_rows: ClassVar[bool] = False
    """Whether reading a few rows of a tensor reads only these rows; files are read in blocks."""

    @property
    def device(self) -> torch.device:
        """The device that tensors are read to."""
        return torch.device("cpu")

    def common_state(self) -> dict[str, Any]:
        """Return the plain values that were saved."""
        return typed_json.decode(self.common)

    def open_reader(self) -> SliceReader:
        """Return a reader of boxes of the stored tensors; a context manager."""
        return ShardReader(self.directory, self.manifest)


@dataclass
class Loaded:
    """The result of a load."""

    state: dict[str, Any]
    missing: set[str]
    """Stored keys that no rank requested (if the policy compares all ranks)."""
    unexpected: set[str]
    """Requested keys that are not stored."""
    bytes_read: int


@dataclass
class _Job:
    """Reads that fill one piece of a tensor."""

    tensor: StoredTensor
    reads: list[ReadItem]
    into: Tensor


KeyMapping = Callable[[ShardedTensor, Manifest], str]


def open_contents(
    directory: str | os.PathLike[str] | ObjectDirectory, *, peers: ControlGroup
) -> Contents:
    """Read and check manifest and plain values on the coordinator, for all ranks: collective.

    Every rank continues with the same bytes.
    """

    def read() -> tuple[StoragePath, bytes, bytes]:
        path = storage_path(directory)
        if isinstance(path, Path) and path.is_symlink():
            path = path.resolve()
        data, manifest = commit.read_manifest(path)
        return path, data, read_listed_file(path, manifest, COMMON_NAME)

    path, manifest_bytes, common_bytes = run_on_coordinator(
        peers, read, doing="reading", path=directory
    )

    def parse() -> Contents:
        manifest = parse_manifest(manifest_bytes, path / MANIFEST_NAME)
        form = typed_json.parse_bytes(common_bytes, what=str(path / COMMON_NAME))
        if type(form) is not dict or form.keys() != {"common", "objects"}:
            raise DamagedCheckpointError(
                f"{path / COMMON_NAME} is not the plain state of a checkpoint."
            )
        return Contents(path, manifest, form["common"], form["objects"])

    return run_collectively(peers, f"reading {directory}", parse)


def load_state(
    template: ShardedStateDict,
    contents: Contents,
    *,
    peers: ControlGroup,
    strict: StrictHandling = StrictHandling.ASSUME_OK_UNEXPECTED,
    key_mapping: KeyMapping = lambda wanted, _: wanted.key,
) -> Loaded:
    """Fill a sharded state dict: collective.

    Args:
        key_mapping: returns the key of the stored tensor that fills a declaration: the
            declaration's own key, or a better one (main weights for weights in another precision).

    Tensors of the template are filled in place; a declaration without data gets a new tensor on
    the current device. Plain values of the template are replaced by the stored ones. A stored
    float is converted to another float dtype of the template; every other mismatch is refused.

    Raises:
        CheckpointError: on every rank, if any rank found a mismatch or a damaged file.
    """

    def build() -> tuple[Any, set[str], set[str], bool]:
        built = _build(template, contents.manifest, key_mapping)
        asked = {leaf.key for leaf in _declared(built)}
        unexpected = {leaf.key for leaf in _declared(built) if not _is_stored(leaf, contents)}
        return built, asked, unexpected, strict.compares_all_ranks

    built, asked, unexpected, compares = run_collectively(
        peers, "declaring the state to load", build
    )
    everywhere = peers.gather(asked) if compares else None

    def plan() -> tuple[list[_Job], set[str], SliceReader]:
        objects = (unique.rsplit("/shard_", 1)[0] for unique in contents.objects)
        stored = {*contents.manifest.tensors, *objects}
        missing = stored.difference(*everywhere) if everywhere is not None else set()
        apply_strictness(strict, unexpected=unexpected, missing=missing, stored=stored)
        return list(_plan(built, contents)), missing, contents.open_reader()

    jobs, missing, reader = run_collectively(peers, "comparing the state with the checkpoint", plan)
    missing = peers.broadcast(missing) if compares else missing

    def read() -> tuple[dict[str, Any], int]:
        num_bytes = _read(jobs, reader)
        return _assemble(built, contents), num_bytes

    state, bytes_read = run_collectively(peers, f"loading {contents.directory}", read)
    return Loaded(state, missing, unexpected, bytes_read)


def _read(jobs: list[_Job], opened: SliceReader) -> int:
    """Fill all tensors, in file order so that the disk sees one pass; return the bytes read."""
    with opened as reader:
        work = [(r.shard.file, r.shard.begin, i, r) for i, j in enumerate(jobs) for r in j.reads]
        for _, _, index, read in sorted(work, key=lambda w: w[:3]):
            job = jobs[index]
            reader.start(job.tensor, read, narrow_to(job.into, read.in_wanted))
        reader.finish()
        return reader.bytes_read


@dataclass
class _Built:
    """A factory, and the declarations it made."""

    factory: ShardedTensorFactory
    parts: Any

    def merged(self, loaded: Any) -> Any:
        """Return the tensor of the loaded parts.

        Parts that are views of the factory's own tensor have filled it already.
        """
        parts = [leaf for _, leaf in leaves(self.parts)]
        if any(leaf is ABSENT for _, leaf in leaves(loaded)):
            return ABSENT
        data = self.factory.data
        is_filled = all(
            isinstance(p, ShardedTensor)
            and p.data is not None
            and p.data.untyped_storage().data_ptr() == data.untyped_storage().data_ptr()
            for p in parts
        ) and data.numel() == sum(p.data.numel() for p in parts)
        return data if is_filled else self.factory.merge_fn(loaded)


def _build(template: Any, manifest: Manifest, key_mapping: KeyMapping) -> Any:
    """Build factories, allocate data for declarations without it, and locate each shard."""

    def build(leaf: Any) -> Any:
        if isinstance(leaf, ShardedTensorFactory):
            parts = map_leaves(build, leaf.build())
            return _Built(leaf, parts)
        if isinstance(leaf, ShardedTensor) and leaf.data is None:
            leaf.init_data(device.current_device())
            if leaf.allow_shape_mismatch and leaf.data is not None:
                leaf.data.zero_()
        if isinstance(leaf, ShardedTensor):
            key = key_mapping(leaf, manifest)
            return leaf if key == leaf.key else replace(leaf, key=key)
        return leaf

    return map_leaves(build, template)


def _declared(built: Any) -> Iterator[ShardedTensor | ShardedObject]:
    for _, leaf in leaves(built):
        if isinstance(leaf, _Built):
            yield from _declared(leaf.parts)
        elif isinstance(leaf, (ShardedTensor, ShardedObject)):
            yield leaf


def _is_stored(leaf: ShardedTensor | ShardedObject, contents: Contents) -> bool:
    if isinstance(leaf, ShardedTensor):
        return leaf.key in contents.manifest.tensors
    return leaf.unique_key in contents.objects


def _plan(built: Any, contents: Contents) -> Iterator[_Job]:
    indices: dict[str, ShardIndex] = {}
    for leaf in _declared(built):
        if not isinstance(leaf, ShardedTensor) or leaf.key not in contents.manifest.tensors:
            continue
        stored = contents.manifest.tensors[leaf.key]
        _check_match(leaf, stored)
        index = indices.setdefault(leaf.key, ShardIndex(stored))
        for box, into in leaf.pieces():
            assert into is not None
            yield _Job(stored, list(index.reads(box)), into)


def _check_match(wanted: ShardedTensor, stored: StoredTensor) -> None:
    same_rank = len(stored.shape) == len(wanted.global_shape)
    if stored.shape != wanted.global_shape and not (wanted.allow_shape_mismatch and same_rank):
        raise CheckpointError(
            f"{wanted.key!r} is stored with global shape {stored.shape}; this run needs "
            f"{wanted.global_shape}.",
            rule="a checkpoint loads into the same model, in any parallel layout",
            flags=["--num-layers", "--hidden-size", "--ffn-hidden-size", "--num-attention-heads"],
            fix="give the model the sizes it was saved with (python tools/checkpoint inspect)",
        )
    have, want = DTYPES[stored.dtype], wanted.dtype
    if have != want and not (have.is_floating_point and want.is_floating_point):
        raise CheckpointError(
            f"{wanted.key!r} is stored as {have}; this run needs {want}.",
            rule="floats convert to other floats; integers and booleans do not convert",
        )
    if have != want and torch.finfo(want).bits < torch.finfo(have).bits:
        logger.info("%s is rounded from %s to %s", wanted.key, have, want)


def narrow_to(tensor: Tensor, box: Box) -> Tensor:
    """Return the view of a box of `tensor` [...]."""
    for dim, (offset, length) in enumerate(zip(*box, strict=True)):
        tensor = tensor.narrow(dim, offset, length)
    return tensor


def read_box(index: ShardIndex, box: Box, reader: SliceReader, into: Tensor) -> None:
    """Fill `into` [...] with a box of a stored tensor."""
    for read in index.reads(box):
        reader.start(index.tensor, read, narrow_to(into, read.in_wanted))
    reader.finish()


def _assemble(built: Any, contents: Contents) -> dict[str, Any]:
    def value(leaf: Any) -> Any:
        if isinstance(leaf, _Built):
            return leaf.merged(map_leaves(value, leaf.parts))
        if isinstance(leaf, ShardedTensor):
            return leaf.data if _is_stored(leaf, contents) else ABSENT
        if isinstance(leaf, ShardedObject):
            form = contents.objects.get(leaf.unique_key, ABSENT)
            return ABSENT if form is ABSENT else typed_json.decode(form)
        if isinstance(leaf, LocalNonpersistentObject):
            return leaf.unwrap()
        return ABSENT  # a plain value: the stored value replaces it

    state = prune(merge(map_leaves(value, built), contents.common_state()))
    # Every rank returns the same parts, also a rank that holds nothing of one of them.
    parts = {name: type(part)() for name, part in built.items() if isinstance(part, dict | list)}
    return parts if state is ABSENT else parts | state
