"""The manifest: every file with size and hash, every tensor with its slices.

    iter_0000010/
      __0_0.safetensors   raw shards of rank 0 (rank, writer)
      common.json         typed JSON: all state that is not a tensor
      manifest.json       this module
      metadata.json       format, version, size and hash of manifest.json; written last

A checkpoint without a matching manifest does not exist. Every byte of every file is verified:
metadata.json has only one valid form, metadata.json contains the hash of manifest.json, and the
manifest contains the hashes of the other files. Types, ranges and coverage are checked before use.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NoReturn

from megatron.core.dist_checkpointing.durable import (
    DamagedCheckpointError,
    OpenFile,
    open_file,
    read_inside,
)
from megatron.core.dist_checkpointing.flat_ranges import Box, coverage_problem
from megatron.core.dist_checkpointing.object_store import StoragePath
from megatron.core.dist_checkpointing.shard_file import (
    BLOCK_BYTES,
    DTYPES,
    HASH_NAME,
    StoredFile,
    element_bytes,
    hash_of,
)
from megatron.core.dist_checkpointing.typed_json import dump_bytes, parse_bytes
from megatron.core.foundation.errors import CheckpointError, shown

METADATA_NAME = "metadata.json"
MANIFEST_NAME = "manifest.json"
COMMON_NAME = "common.json"
BACKEND = "lattice"
VERSION = 1
_SHARD_FILE = re.compile(r"__\d{1,9}_\d{1,4}\.safetensors", re.ASCII)
_HASH = re.compile(r"[0-9a-f]{64}", re.ASCII)
_METADATA_LIMIT = 1 << 16
_MANIFEST_LIMIT = 4 << 30


@dataclass(frozen=True)
class Shard:
    """One stored box of a tensor."""

    offset: tuple[int, ...]
    shape: tuple[int, ...]
    file: str
    begin: int
    """Position of its first byte in the file."""
    hashes: tuple[str, ...]
    """Hash of each block of its bytes."""

    @property
    def box(self) -> Box:
        """(offset, shape)."""
        return self.offset, self.shape


@dataclass(frozen=True)
class StoredTensor:
    """A global tensor and the stored boxes that make it up."""

    dtype: str
    shape: tuple[int, ...]
    shards: tuple[Shard, ...]
    is_padded: bool = False
    """Its first dimension is padded (a vocabulary): its size may differ between layouts."""

    def shard_bytes(self, shard: Shard) -> int:
        """Return the stored size of a shard."""
        return math.prod(shard.shape) * element_bytes(self.dtype)

    @property
    def num_bytes(self) -> int:
        """Size of the full tensor."""
        return math.prod(self.shape) * element_bytes(self.dtype)


@dataclass(frozen=True)
class ManifestFile:
    """One file: its size, and the hash of all of it or, for shard files, of its header."""

    size: int
    hash: str
    header_size: int | None = None
    """Bytes before the first shard; None for a file that is hashed whole."""

    @staticmethod
    def of(stored: StoredFile) -> ManifestFile:
        """Describe a shard file that was written."""
        return ManifestFile(stored.size, stored.header_hash, stored.header_size)


@dataclass(frozen=True)
class Manifest:
    """Contents of a checkpoint directory."""

    name: str
    """Name of the original directory; a copy under another iteration is refused."""
    run: str
    """Identifier of the process group that wrote the checkpoint."""
    files: Mapping[str, ManifestFile]
    tensors: Mapping[str, StoredTensor]
    info: Mapping[str, Any] = field(default_factory=dict)
    """JSON metadata for people and tools: layout, versions, content metadata (typed JSON forms)."""

    def to_bytes(self) -> bytes:
        """Return manifest.json."""
        files = {
            name: {"size": f.size, "hash": f.hash}
            | ({} if f.header_size is None else {"header_size": f.header_size})
            for name, f in sorted(self.files.items())
        }
        tensors = {
            key: {
                "dtype": t.dtype,
                "shape": list(t.shape),
                "is_padded": t.is_padded,
                "shards": [
                    {
                        "offset": list(s.offset),
                        "shape": list(s.shape),
                        "file": s.file,
                        "begin": s.begin,
                        "hashes": list(s.hashes),
                    }
                    for s in t.shards
                ],
            }
            for key, t in sorted(self.tensors.items())
        }
        return dump_bytes(
            {
                "format": BACKEND,
                "version": VERSION,
                "hash": HASH_NAME,
                "block_bytes": BLOCK_BYTES,
                "name": self.name,
                "run": self.run,
                "info": dict(self.info),
                "files": files,
                "tensors": tensors,
            }
        )


def metadata_bytes(manifest: bytes) -> bytes:
    """Return the only metadata.json that belongs to a manifest."""
    return dump_bytes(
        {
            "sharded_backend": BACKEND,
            "sharded_backend_version": VERSION,
            "manifest_size": len(manifest),
            "manifest_hash": hash_of(manifest),
        }
    )


def read_manifest_bytes(directory: StoragePath) -> bytes:
    """Read manifest.json, and check that metadata.json matches it.

    Raises:
        CheckpointError: a file is missing, damaged, or another program's.
    """
    metadata = read_inside(directory, METADATA_NAME, limit_bytes=_METADATA_LIMIT)
    found = parse_bytes(metadata, what=str(directory / METADATA_NAME))
    backend = found.get("sharded_backend") if isinstance(found, dict) else None
    if isinstance(backend, str) and backend in ("torch_dist", "zarr", "fsdp_dtensor", "torch_dcp"):
        raise CheckpointError(
            f"{directory} is a Megatron-LM checkpoint of format {backend!r}.",
            rule="this function opens only checkpoints of the format 'lattice'",
            flags=["--load", "--ckpt-format"],
            fix="--load and tools/checkpoint open it; from a program, dist_checkpointing.load",
        )
    if backend != BACKEND:
        _damaged(directory / METADATA_NAME, "it does not name a format of checkpoints")
    manifest = read_inside(directory, MANIFEST_NAME, limit_bytes=_MANIFEST_LIMIT)
    expected = metadata_bytes(manifest)
    if metadata != expected:
        if found.get("manifest_hash") != hash_of(manifest):
            _damaged(
                directory / MANIFEST_NAME, f"its hash differs from the hash in {METADATA_NAME}"
            )
        _damaged(directory / METADATA_NAME, f"its fields do not match {MANIFEST_NAME}")
    return manifest


def check_sizes(directory: StoragePath, manifest: Manifest) -> None:
    """Check that every listed file exists, is a regular file and has the listed size."""
    for name, file in manifest.files.items():
        with open_file(directory, name) as opened:
            if opened.size != file.size:
                _damaged(directory / name, f"it has {opened.size} bytes instead of {file.size}")


def read_listed_file(directory: StoragePath, manifest: Manifest, name: str) -> bytes:
    """Read a file that is hashed whole, and verify it."""
    file = manifest.files.get(name)
    if file is None or file.header_size is not None:
        _damaged(directory / MANIFEST_NAME, f"it lists no plain file {name}")
    data = read_inside(directory, name, limit_bytes=file.size)
    if len(data) != file.size or hash_of(data) != file.hash:
        _damaged(directory / name, f"its {HASH_NAME} is not the one in {MANIFEST_NAME}")
    return data


def read_header(file: OpenFile, manifest: Manifest, name: str, path: StoragePath) -> bytes:
    """Read and verify the header of an open shard file, and the size of the file."""
    listed = manifest.files[name]
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
    return bytes(header)


def parse_manifest(data: bytes, path: StoragePath) -> Manifest:
    """Parse manifest.json and check that it is consistent in itself.

    Args:
        path: its file, for messages.
    Raises:
        CheckpointError: it breaks a rule of the format.
    """
    form = parse_bytes(data, what=str(path))
    reader = _Reader(path)
    top = reader.fields(
        form,
        {"format": str, "version": int, "hash": str, "block_bytes": int, "name": str, "run": str,
         "info": dict, "files": dict, "tensors": dict},
        "the manifest",
    )  # fmt: skip
    known = {"format": BACKEND, "version": VERSION, "hash": HASH_NAME, "block_bytes": BLOCK_BYTES}
    for name, value in known.items():
        if top[name] != value:
            _damaged(path, f"{name} is {shown(top[name], 80)}; this version reads {value!r}")
    files = {name: reader.file(name, entry) for name, entry in top["files"].items()}
    tensors = {key: reader.tensor(key, entry, files) for key, entry in top["tensors"].items()}
    _check_tiling(path, files, tensors)
    return Manifest(top["name"], top["run"], files, tensors, top["info"])


class _Reader:
    """Typed access to untrusted JSON."""

    def __init__(self, path: StoragePath) -> None:
        self.path = path

    def fields(self, form: Any, types: Mapping[str, type], what: str) -> dict[str, Any]:
        if type(form) is not dict or form.keys() != types.keys():
            _damaged(self.path, f"{what} does not have the fields {', '.join(types)}")
        for name, kind in types.items():
            if type(form[name]) is not kind:
                _damaged(self.path, f"{name} of {what} is not of type {kind.__name__}")
        return form

    def numbers(self, form: Any, what: str) -> tuple[int, ...]:
        if type(form) is not list or any(type(n) is not int or not 0 <= n < 1 << 63 for n in form):
            _damaged(self.path, f"{what} is not a list of sizes")
        return tuple(form)

    def hash(self, form: Any, what: str) -> str:
        if type(form) is not str or not _HASH.fullmatch(form):
            _damaged(self.path, f"the hash of {what} is not a {HASH_NAME}")
        return form

    def file(self, name: str, form: Any) -> ManifestFile:
        what = f"file {shown(name, 80)}"
        is_shard_file = _SHARD_FILE.fullmatch(name) is not None
        if not is_shard_file and name != COMMON_NAME:
            raise DamagedCheckpointError(
                f"CKPT_UNSAFE file={self.path}: it lists {what}.",
                rule=f"a manifest lists {COMMON_NAME} and __RANK_WRITER.safetensors only",
            )
        types = {"size": int, "hash": str} | ({"header_size": int} if is_shard_file else {})
        form = self.fields(form, types, what)
        sizes = self.numbers([form["size"], form.get("header_size", 0)], what)
        if sizes[1] > sizes[0]:
            _damaged(self.path, f"the header of {what} is longer than the file")
        return ManifestFile(sizes[0], self.hash(form["hash"], what), form.get("header_size"))

    def tensor(self, key: str, form: Any, files: Mapping[str, ManifestFile]) -> StoredTensor:
        what = f"tensor {shown(key, 120)}"
        types = {"dtype": str, "shape": list, "is_padded": bool, "shards": list}
        form = self.fields(form, types, what)
        if form["dtype"] not in DTYPES:
            _damaged(self.path, f"{what} has the unknown dtype {shown(form['dtype'], 40)}")
        shape = self.numbers(form["shape"], what)
        if len(shape) > 16 or math.prod(shape) >= 1 << 62:
            _damaged(self.path, f"{what} has an impossible shape")
        item = element_bytes(form["dtype"])
        shards = tuple(self.shard(s, what, len(shape), item, files) for s in form["shards"])
        problem = coverage_problem(shape, [s.box for s in shards])
        if problem is not None:
            _damaged(self.path, f"{what}: {problem}")
        return StoredTensor(form["dtype"], shape, shards, form["is_padded"])

    def shard(
        self, form: Any, what: str, ndim: int, item: int, files: Mapping[str, ManifestFile]
    ) -> Shard:
        types = {"offset": list, "shape": list, "file": str, "begin": int, "hashes": list}
        form = self.fields(form, types, f"a shard of {what}")
        offset, shape = self.numbers(form["offset"], what), self.numbers(form["shape"], what)
        (begin,) = self.numbers([form["begin"]], what)
        if len(offset) != ndim or len(shape) != ndim:
            _damaged(self.path, f"a shard of {what} has another number of dimensions")
        file = files.get(form["file"])
        if file is None or file.header_size is None:
            _damaged(self.path, f"a shard of {what} is in a file that is not listed")
        num_bytes = math.prod(shape) * item
        if begin + num_bytes > file.size:
            _damaged(self.path, f"a shard of {what} ends after its file")
        if len(form["hashes"]) != -(-num_bytes // BLOCK_BYTES):
            _damaged(self.path, f"a shard of {what} has the wrong number of hashes")
        hashes = tuple(self.hash(h, what) for h in form["hashes"])
        return Shard(offset, shape, form["file"], begin, hashes)


def _check_tiling(
    path: StoragePath, files: Mapping[str, ManifestFile], tensors: Mapping[str, StoredTensor]
) -> None:
    """Check that every byte of a shard file belongs to its header or to exactly one shard."""
    spans: dict[str, list[tuple[int, int]]] = {name: [] for name in files}
    for tensor in tensors.values():
        for shard in tensor.shards:
            spans[shard.file].append((shard.begin, shard.begin + tensor.shard_bytes(shard)))
    for name, file in files.items():
        if file.header_size is None:
            continue
        position = file.header_size
        for begin, end in sorted(spans[name]):
            if begin != position:
                _damaged(path, f"the shards of {name} leave or share bytes at {position}")
            position = end
        if position != file.size:
            _damaged(path, f"the shards of {name} end at byte {position} of {file.size}")


def build_manifest(
    name: str,
    run: str,
    files: Mapping[str, ManifestFile],
    tensors: Mapping[str, tuple[str, Sequence[int], bool]],
    shards: Mapping[str, Sequence[Shard]],
    info: Mapping[str, object],
) -> Manifest:
    """Assemble the manifest of a finished set of files.

    Args:
        tensors: key -> (dtype name, global shape, is_padded).
        shards: key -> the boxes that ranks wrote.
    """
    stored = {
        key: StoredTensor(
            dtype, tuple(shape), tuple(sorted(shards[key], key=lambda s: s.offset)), is_padded
        )
        for key, (dtype, shape, is_padded) in tensors.items()
    }
    return Manifest(name, run, dict(files), stored, dict(info))


def _damaged(path: StoragePath, what: str) -> NoReturn:
    raise DamagedCheckpointError(
        f"{path} is damaged: {what}.",
        rule="a checkpoint without a manifest that matches does not exist",
        fix="use another checkpoint; check the storage",
    )
