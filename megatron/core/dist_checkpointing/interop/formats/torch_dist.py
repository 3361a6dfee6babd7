"""Read Megatron-LM's `torch_dist` checkpoints: torch's distributed format with Megatron's keys.

    metadata.json    {"sharded_backend": "torch_dist", ...}
    .metadata        a pickle: shape and chunks of every tensor, file and position of every chunk
    __R_W.distcp     chunks and plain values, each as a file of torch.save
    common.pt        plain state (in newer versions the entry common_state/shard_0_1)

Keys are global and independent of the layout, as in this program: layers are stacked along a
leading axis, a gated first MLP layer is [gate; up]. So a chunk is a box of the tensor that this
program stores too.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NoReturn

import torch

from megatron.core.dist_checkpointing.durable import (
    DamagedCheckpointError,
    open_local,
    read_inside,
)
from megatron.core.dist_checkpointing.interop.buffer_state import KEY as BUFFER_KEY
from megatron.core.dist_checkpointing.interop.buffer_state import Buckets, Layout, add_buffers
from megatron.core.dist_checkpointing.interop.contents import (
    CheckpointFormat,
    ContentsBuilder,
    InteropContents,
    SavedTensor,
    listed,
    not_readable,
)
from megatron.core.dist_checkpointing.interop.pickles import Record, load_pickle
from megatron.core.dist_checkpointing.interop.rank_state import (
    FINAL_NORM_OF_HYBRID,
    common_values,
    describe_layout,
    steps_in,
)
from megatron.core.dist_checkpointing.interop.stored_view import sizes_of
from megatron.core.dist_checkpointing.interop.torch_file import read_torch_file, read_torch_range
from megatron.core.dist_checkpointing.loader import Contents
from megatron.core.dist_checkpointing.manifest import METADATA_NAME
from megatron.core.dist_checkpointing.shard_file import DTYPES
from megatron.core.foundation.errors import CheckpointError, shown

MEGATRON_FORMATS = ("torch_dist", "zarr", "torch_dcp", "fsdp_dtensor")
"""Names in Megatron-LM's metadata.json."""
METADATA_LIMIT = 1 << 31
_DATA_FILE = re.compile(r"__\d+_\d+\.distcp", re.ASCII)
_CHAIN = re.compile(r"(?:optimizer\.)?chained_\d+\.", re.ASCII)
_MAIN_WEIGHT = "optimizer.state.param."
_BUFFER_GROUPS = re.compile(r".*optimizer\.distributed\.dp_group_idx_\d+\.optimizer/shard_\S+")
_LAYOUT_ARGS = (
    "tensor_model_parallel_size",
    "pipeline_model_parallel_size",
    "virtual_pipeline_model_parallel_size",
)
_COMMON_ENTRY = "common_state/shard_0_1"
_BY_BUFFER = "optimizer.distributed."


def megatron_format(directory: Path) -> str | None:
    """Return the format that a metadata.json names; None if it is not one of Megatron-LM's."""
    try:
        form = json.loads(read_inside(directory, METADATA_NAME, limit_bytes=1 << 16))
    except (CheckpointError, ValueError, RecursionError):
        return None  # the native reader raises the error
    backend = form.get("sharded_backend") if isinstance(form, dict) else None
    # An unknown name is damage; the native reader raises that error, too.
    return backend if backend in MEGATRON_FORMATS else None


def is_torch_dist(directory: Path) -> bool:
    """Return whether the directory has the files of such a checkpoint.

    Raises:
        CheckpointError: it has only some of them.
    """
    names = listed(directory)
    if METADATA_NAME not in names:
        return ".metadata" in names
    if megatron_format(directory) != "torch_dist":
        return False
    if ".metadata" not in names:
        raise not_readable(directory, ".metadata is missing", "fetch it, or save it again")
    return True


def open_torch_dist(directory: Path) -> InteropContents:
    """Open a checkpoint of the format.

    Raises:
        DamagedCheckpointError: a file is missing, damaged or hostile.
    """
    metadata = _Metadata(directory)
    builder = ContentsBuilder(directory, "Megatron-LM torch_dist")
    buffers: dict[tuple[int, int], Buckets] = {}
    has_unknown_buffers = False
    for key, entry in metadata.tensors.items():
        dtype = metadata.dtype(key, entry)
        if _BY_BUFFER in key:
            match = BUFFER_KEY.fullmatch(key)
            has_unknown_buffers |= match is None
            if match is not None:
                rows = [(offset[0], saved) for offset, saved in metadata.chunks(key, entry, dtype)]
                buckets = buffers.setdefault((int(match[1]), int(match[2])), {})
                buckets.setdefault(int(match[4]), {})[match[5]] = sorted(rows, key=lambda r: r[0])
            continue
        own_key = _own_key(key)
        if dtype not in DTYPES.values() or key in metadata.flattened:
            continue
        shape = sizes_of(entry["size"])
        builder.declare(own_key, dtype, shape)
        for offset, saved in metadata.chunks(key, entry, dtype):
            builder.add(own_key, offset, saved)
    common = _common_state(directory, metadata)
    builder.optimizer_step = steps_in(common.get("optimizer"))
    values, run = common_values(common)
    why = "it is of an older form" if has_unknown_buffers or metadata.flattened else None
    if buffers and why is None:
        layout = Layout(*(run.get(name) or 1 for name in _LAYOUT_ARGS))
        why = add_buffers(builder, buffers, layout)
        builder.optimizer_step = metadata.step_of_buffers(builder.optimizer_step)
    if why is not None:
        builder.no_optimizer = (
            f"its optimizer state is stored by internal buffer, not by parameter, and {why}: "
            "saving it there with --dist-ckpt-optim-fully-reshardable makes it readable"
        )
    builder.layout = describe_layout(run)
    return builder.finish(values, run)


class _Metadata:
    """The file `.metadata`, with types checked on access."""

    def __init__(self, directory: Path) -> None:
        self.directory, self.path = directory, directory / ".metadata"
        data = read_inside(directory, ".metadata", limit_bytes=METADATA_LIMIT)
        root = load_pickle(data, what=str(self.path))
        if not isinstance(root, Record) or not root.kind.endswith(".Metadata"):
            self.damaged("it holds no metadata")
        entries, locations = root["state_dict_metadata"], root["storage_data"]
        if not isinstance(entries, dict) or not isinstance(locations, dict):
            self.damaged("it does not list tensors and locations")
        self.tensors = {
            str(k): v
            for k, v in entries.items()
            if isinstance(v, Record) and v.kind.endswith(".TensorStorageMetadata")
        }
        self._locations: dict[tuple[str, tuple[int, ...] | None], Record] = {}
        for index, info in locations.items():
            if isinstance(index, Record) and isinstance(info, Record):
                offset = index.get("offset")
                self._locations[index["fqn"], None if offset is None else sizes_of(offset)] = info
        extra = root.get("mcore_data") or {}
        self.flattened = {
            key
            for key, saved in (extra.items() if isinstance(extra, dict) else ())
            if isinstance(saved, dict) and "nd_reformulated_orig_global_shape" in saved
        }
        """Keys of older versions whose chunks are ranges of flattened shards."""
        self._files = {name for name in listed(directory) if _DATA_FILE.fullmatch(name)}
        self._check_locations()

    def _check_locations(self) -> None:
        """Refuse chunks that share bytes: the format has no checksum of its metadata, so no
        other check detects a changed location."""
        spans: dict[str, list[tuple[int, int, str]]] = {}
        for key, offset in self._locations:
            begin, length, name = self.location(key, offset)
            spans.setdefault(name, []).append((begin, begin + length, key))
        for name, locations in spans.items():
            end, before = 0, ""
            for begin, stop, key in sorted(locations):
                if begin < end:
                    self.damaged(
                        f"{shown(before, 120)} and {shown(key, 120)} share bytes of {name}"
                    )
                end, before = stop, key

    def dtype(self, key: str, entry: Record) -> torch.dtype:
        properties = entry["properties"]
        state = properties.state if isinstance(properties, Record) else None
        dtype = state[0] if isinstance(state, tuple) and state else None
        if isinstance(state, dict):
            dtype = state.get("dtype")
        if not isinstance(dtype, torch.dtype):
            self.damaged(f"{shown(key, 120)} has no dtype")
        return dtype

    def location(self, key: str, offset: tuple[int, ...] | None) -> tuple[int, int, str]:
        """Return (first byte, length, file) of a chunk or, without offset, of a plain value."""
        info = self._locations.get((key, offset))
        if info is None:
            self.damaged(f"a chunk of {shown(key, 120)} is in no file")
        name, begin, length = info["relative_path"], info["offset"], info["length"]
        if type(name) is not str or name not in self._files:
            raise DamagedCheckpointError(
                f"CKPT_UNSAFE file={self.path}: the location of {shown(key, 120)} is "
                f"{shown(name, 120)}, which is not a data file of {self.directory}.",
                rule="chunks are in files __RANK_WRITER.distcp of the same directory",
            )
        if type(begin) is not int or type(length) is not int or begin < 0 or length <= 0:
            self.damaged(f"the location of {shown(key, 120)} is no range of bytes")
        if info.get("transform_descriptors"):
            self.damaged(f"{shown(key, 120)} is compressed or encrypted")
        return begin, length, name

    def chunks(
        self, key: str, entry: Record, dtype: torch.dtype
    ) -> Iterator[tuple[tuple[int, ...], SavedTensor]]:
        """Yield (offset, chunk) of a tensor."""
        for chunk in entry["chunks"]:
            offset, sizes = sizes_of(chunk["offsets"]), sizes_of(chunk["sizes"])
            begin, length, name = self.location(key, offset)
            yield offset, SavedTensor(self.directory / name, begin, length, dtype, sizes)

    def step_of_buffers(self, known: int) -> int:
        """Return the number of updates, which is stored next to the buffers."""
        for key, offset in self._locations:
            if offset is None and _BUFFER_GROUPS.fullmatch(key):
                known = max(known, steps_in(self.plain_value(key)))
        return known

    def plain_value(self, key: str) -> Any:
        """Read a plain value; None if there is none of that key."""
        if (key, None) not in self._locations:
            return None
        begin, length, name = self.location(key, None)
        with open_local(self.directory, name) as file:
            return read_torch_range(file, begin, min(length, file.size - begin))

    def damaged(self, what: str) -> NoReturn:
        raise DamagedCheckpointError(
            f"{self.path} is damaged: {what}.",
            rule="it describes every chunk of every tensor",
            fix="use another checkpoint",
        )


def _common_state(directory: Path, metadata: _Metadata) -> dict[str, Any]:
    if "common.pt" in listed(directory):
        common = read_torch_file(directory / "common.pt")
    else:
        common = metadata.plain_value(_COMMON_ENTRY)
    return common if isinstance(common, dict) else {}


def _own_key(key: str) -> str:
    """Return this program's key: one optimizer, main weights under their own name, and one name of
    the final norm."""
    chain = _CHAIN.match(key)
    if chain is not None:
        key = key[chain.end() :]
    if key.startswith(_MAIN_WEIGHT):
        key = "optimizer.state.fp32_param." + key.removeprefix(_MAIN_WEIGHT)
    return key.replace(*FINAL_NORM_OF_HYBRID)


def _write(contents: Contents, directory: Path, with_optimizer: bool) -> None:
    # torch's distributed checkpoints take half a second to import, and only this writer needs them.
    from megatron.core.dist_checkpointing.interop.torch_dist_writer import write_torch_dist

    write_torch_dist(contents, directory, with_optimizer=with_optimizer)


FORMAT = CheckpointFormat(
    name="torch_dist", recognises=is_torch_dist, open=open_torch_dist, write=_write
)
