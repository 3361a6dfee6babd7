"""A checkpoint of another program, under this program's names: tensors are views into its files.

A reader of a format (`torch_dist`, `legacy`, `deepspeed`) fills a `ContentsBuilder`. The builder
returns the same description that a native checkpoint has, so the loader does not depend on the
format: it requests boxes of global tensors, and only the bytes around these boxes are read.
"""

from __future__ import annotations

import math
import os
import re
from argparse import Namespace
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from megatron.core.dist_checkpointing import typed_json
from megatron.core.dist_checkpointing.durable import DamagedCheckpointError
from megatron.core.dist_checkpointing.flat_ranges import Box, coverage_problem
from megatron.core.dist_checkpointing.interop.pickles import Record
from megatron.core.dist_checkpointing.interop.stored_view import StoredView, ViewReader
from megatron.core.dist_checkpointing.interop.torch_file import read_torch_range
from megatron.core.dist_checkpointing.loader import Contents
from megatron.core.dist_checkpointing.manifest import Manifest, Shard, StoredTensor
from megatron.core.dist_checkpointing.mapping import ShardedTensor
from megatron.core.dist_checkpointing.shard_file import dtype_name
from megatron.core.dist_checkpointing.shard_plan import ReadItem
from megatron.core.foundation.errors import CheckpointError, shown

PADDED_KEYS = ("embedding.word_embeddings.weight", "output_layer.weight")
"""Their first dimension is padded for the tensor-parallel size."""
MAX_SHARING = 16
_FREE_BYTES = 64 << 20
_INDEXED_LAYER = re.compile(r"(.*\blayers)\.(\d+)\.(.+)", re.ASCII)


@dataclass(frozen=True)
class SavedTensor:
    """A tensor that was saved as a file of its own inside a file; opened when it is read."""

    path: Path
    begin: int
    length: int
    dtype: torch.dtype
    shape: tuple[int, ...]


@dataclass(frozen=True)
class SavedPart:
    """A box of a tensor whose elements follow each other in a flat saved tensor."""

    saved: SavedTensor
    first: int
    """Element of the flat tensor where the full tensor would begin; negative if its beginning is
    stored elsewhere. The box itself is in the flat tensor."""
    full: tuple[int, ...]
    """Shape of the tensor."""
    box: Box

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of the box."""
        return self.box[1]


Source = StoredView | SavedTensor | SavedPart


@dataclass(frozen=True)
class InteropShard(Shard):
    """A box of a global tensor, and its source."""

    source: Source = field(kw_only=True)
    """Data in the box's shape; leading axes of size 1 may be absent."""

    @classmethod
    def of(cls, offset: tuple[int, ...], source: Source) -> InteropShard:
        """Describe the box at `offset` that `source` fills."""
        saved = source.saved if isinstance(source, SavedPart) else source
        where = saved.storage if isinstance(saved, StoredView) else saved
        shape = (1,) * (len(offset) - len(source.shape)) + tuple(source.shape)
        return cls(offset, shape, str(where.path), where.begin, (), source=source)


@dataclass
class ViewContents(Contents):
    """An opened checkpoint of this program, with its keys and plain values, in another format."""

    def open_reader(self) -> InteropReader:
        """Return a reader of its shards."""
        return InteropReader()


@dataclass
class InteropContents(ViewContents):
    """An opened checkpoint of another program."""

    kind: str = ""
    """Name of the format, for people."""
    notes: list[str] = field(default_factory=list)
    """Notes for the log."""
    optimizer_step: int = 0
    no_optimizer: str | None = None
    """Why the optimizer state cannot be read; None if it can."""

    @property
    def why_no_moments(self) -> str | None:
        """Why the moments of an optimizer cannot be read; None if they can."""
        if any(key.startswith("optimizer.state.exp_avg.") for key in self.manifest.tensors):
            return self.no_optimizer
        return self.no_optimizer or "it contains no optimizer state"

    def complete_optimizer(self, state: Any, template: Any) -> None:
        """Fill in, in place, the plain values that the optimizer needs in addition to its tensors.

        Args:
            state: the loaded optimizer state.
            template: its declaration, with the settings of this run; chained optimizers are nested.
        """
        if not isinstance(template, Mapping):
            return
        if "param_groups" not in template:
            for name, inner in template.items():
                self.complete_optimizer(state.setdefault(name, {}), inner)
            return
        state["param_groups"] = [dict(group) for group in template["param_groups"]]
        state.setdefault("state", {})["step"] = self.optimizer_step
        state["grad_scaler"] = self.common_state().get("grad_scaler", {})


def slice_of_stack(declared: ShardedTensor, manifest: Manifest) -> ShardedTensor:
    """Return a declaration of one layer's tensor as a slice of the stored stack, if there is one.

    Models of this library declare stacks themselves; others name every layer.
    """
    match = _INDEXED_LAYER.fullmatch(declared.key)
    stack = None if match is None else manifest.tensors.get(f"{match[1]}.{match[3]}")
    if match is None or stack is None or declared.key in manifest.tensors:
        return declared
    return replace(
        declared,
        key=f"{match[1]}.{match[3]}",
        global_shape=(stack.shape[0], *declared.global_shape),
        global_offset=(int(match[2]), *declared.global_offset),
        axis_fragmentations=None,
        prepend_axis_num=declared.prepend_axis_num + 1,
    )


class InteropReader(ViewReader):
    """Fills boxes from shards of other programs. Use as a context manager."""

    def __init__(self) -> None:
        super().__init__()
        self._opened: dict[SavedTensor, StoredView] = {}

    def start(self, tensor: StoredTensor, read: ReadItem, into: Tensor) -> None:
        """Fill `into`, of the shape of `read`."""
        assert isinstance(read.shard, InteropShard)
        self.read_box(read.shard, read.in_shard, into)

    def finish(self) -> None:
        """Return at once: reads are synchronous."""

    def read_box(self, shard: InteropShard, box: Box, into: Tensor) -> None:
        """Fill `into` from a box of a shard."""
        source = shard.source
        if isinstance(source, SavedPart):
            view = (
                self._open(source.saved).unflattened(source.full, source.first).narrow(source.box)
            )
        else:
            view = self._open(source) if isinstance(source, SavedTensor) else source
        missing = len(shard.shape) - len(view.shape)
        if missing:
            view = replace(view, shape=shard.shape, stride=(0,) * missing + view.stride)
        self.read(view.narrow(box), into)

    def _open(self, saved: SavedTensor) -> StoredView:
        if saved not in self._opened:
            view = read_torch_range(self.file(saved.path), saved.begin, saved.length)
            if (
                not isinstance(view, StoredView)
                or view.shape != saved.shape
                or view.dtype != saved.dtype
            ):
                raise DamagedCheckpointError(
                    f"{saved.path} is damaged: at byte {saved.begin} there is no tensor of shape "
                    f"{saved.shape} and {saved.dtype}, as the metadata says.",
                    rule="metadata and data files belong together",
                    fix="use another checkpoint",
                )
            self._opened[saved] = view
        return self._opened[saved]


class ContentsBuilder:
    """Collects the tensors that the reader of a format finds."""

    def __init__(self, directory: Path, kind: str) -> None:
        self.directory, self.kind = directory, kind
        self.notes: list[str] = []
        self.optimizer_step = 0
        self.no_optimizer: str | None = None
        self.layout: dict[str, Any] = {}
        self._tensors: dict[str, tuple[str, tuple[int, ...], list[InteropShard]]] = {}

    def declare(self, key: str, dtype: torch.dtype, shape: tuple[int, ...]) -> None:
        """Declare a tensor; a second declaration must be equal."""
        name = dtype_name(dtype)
        known = self._tensors.setdefault(key, (name, tuple(shape), []))
        if known[:2] != (name, tuple(shape)):
            raise DamagedCheckpointError(
                f"{self.directory}: {shown(key, 120)} is {known[0]} of shape {shown(known[1])} in "
                f"one file and {name} of shape {shown(tuple(shape))} in another.",
                rule="all files of a checkpoint describe one model",
            )

    def add(self, key: str, offset: tuple[int, ...], source: Source) -> None:
        """Add a box of a declared tensor."""
        self._tensors[key][2].append(InteropShard.of(offset, source))

    def stored(self) -> dict[str, StoredTensor]:
        """Return the tensors described so far."""
        return {k: StoredTensor(d, s, tuple(v)) for k, (d, s, v) in self._tensors.items()}

    def add_whole(self, key: str, source: StoredView) -> None:
        """Declare a tensor that one view holds."""
        self.declare(key, source.dtype, source.shape)
        self.add(key, (0,) * len(source.shape), source)

    def finish(self, state: Mapping[str, object], run: Mapping[str, object]) -> InteropContents:
        """Return the contents.

        Args:
            state: plain values of the checkpoint to keep, in this program's names.
            run: the settings (args) of the run that saved it.
        """
        tensors = _with_stacks(self._complete())
        args = plain_values(run)
        common = plain_values(state) | {"args": Namespace(**args)}
        return InteropContents(
            self.directory,
            Manifest(self.directory.name, "", {}, tensors, {"layout": self.layout}),
            typed_json.encode(common, where="common"),
            {},
            kind=self.kind,
            notes=self.notes,
            optimizer_step=self.optimizer_step,
            no_optimizer=self.no_optimizer,
        )

    def finish_own(self, state: bytes) -> ViewContents:
        """Return the contents of a checkpoint whose keys and plain values are this program's.

        Args:
            state: see `rewrite.state_bytes`.
        """
        form = typed_json.parse_bytes(state, what=str(self.directory))
        if type(form) is not dict or form.keys() != {"common", "objects", "info"}:
            raise DamagedCheckpointError(f"{self.directory} lacks its plain state.")
        manifest = Manifest(self.directory.name, "", {}, self._complete(), form["info"])
        return ViewContents(self.directory, manifest, form["common"], form["objects"])

    def _complete(self) -> dict[str, StoredTensor]:
        """Return all tensors; every element of each is stored once."""
        self._check_amount()
        tensors: dict[str, StoredTensor] = {}
        for key, (dtype, shape, shards) in self._tensors.items():
            problem = coverage_problem(shape, [shard.box for shard in shards])
            if problem is not None:
                raise DamagedCheckpointError(
                    f"{self.directory} is incomplete or damaged: {shown(key, 120)}: {problem}.",
                    rule="the pieces of a tensor cover each element exactly once",
                    fix="use another checkpoint, or fetch the files that are missing",
                )
            tensors[key] = StoredTensor(dtype, shape, tuple(shards), key.endswith(PADDED_KEYS))
        return tensors

    def _check_amount(self) -> None:
        """Refuse tensors with far more bytes than the files: views that share their storage."""
        claimed, storages = 0, {}
        for _, _, shards in self._tensors.values():
            for shard in shards:
                if isinstance(shard.source, StoredView):
                    claimed += math.prod(shard.shape) * shard.source.dtype.itemsize
                    storages[id(shard.source.storage)] = shard.source.storage.num_bytes
        stored = sum(storages.values())
        if claimed > MAX_SHARING * stored + _FREE_BYTES:
            raise DamagedCheckpointError(
                f"CKPT_UNSAFE file={self.directory}: it lists tensors of {claimed} bytes over "
                f"storages of {stored} bytes.",
                rule=f"tensors may share a storage (tied weights), but are at most {MAX_SHARING} "
                "times as large as all storages",
                fix="use another checkpoint",
            )


def _with_stacks(tensors: Mapping[str, StoredTensor]) -> dict[str, StoredTensor]:
    """Add stacks of layers that are stored one by one: `layers.<name>`, layer axis first.

    Where all layers are equal the stacks replace the layers; otherwise both are kept, since a model
    with different layers requests each layer by its number.
    """
    groups: dict[str, dict[int, str]] = {}
    for key in tensors:
        match = _INDEXED_LAYER.fullmatch(key)
        if match is not None:
            groups.setdefault(f"{match[1]}.{match[3]}", {})[int(match[2])] = key
    stacks: dict[str, StoredTensor] = {}
    for stack, keys in groups.items():
        layers = [tensors[keys[i]] for i in sorted(keys)]
        is_complete = sorted(keys) == list(range(len(keys))) and stack not in tensors
        if not is_complete or len({(t.dtype, t.shape) for t in layers}) > 1:
            continue
        shards = [
            replace(shard, offset=(i, *shard.offset), shape=(1, *shard.shape))
            for i, tensor in enumerate(layers)
            for shard in tensor.shards
        ]
        shape = (len(layers), *layers[0].shape)
        stacks[stack] = StoredTensor(layers[0].dtype, shape, tuple(shards))
    if len(stacks) < len(groups) or len({len(keys) for keys in groups.values()}) > 1:
        return {**tensors, **stacks}
    single = {key for keys in groups.values() for key in keys.values()}
    return {key: t for key, t in tensors.items() if key not in single} | stacks


def plain_values(values: Mapping[str, object]) -> dict[str, Any]:
    """Reduce values of another program to numbers, text and containers of them.

    A tensor of one element becomes a number; other tensors are left out; an object becomes the
    name of its class.
    """
    with ViewReader() as reader:
        return {
            str(name): _plain(value, reader)
            for name, value in values.items()
            if not (isinstance(value, StoredView) and math.prod(value.shape) != 1)
        }


def _plain(value: Any, reader: ViewReader) -> Any:
    if isinstance(value, StoredView):
        if math.prod(value.shape) == 1:
            return reader.read_full(value).reshape(()).item()
        return None
    if isinstance(value, dict):
        items = value.items()
        return {k if isinstance(k, (str, int)) else str(k): _plain(v, reader) for k, v in items}
    if isinstance(value, (list, set, frozenset)):
        return [_plain(item, reader) for item in value]
    if isinstance(value, tuple):
        return tuple(_plain(item, reader) for item in value)
    if isinstance(value, Record):
        argument = value.args[0] if len(value.args) == 1 else None
        return f"{value.kind}({argument})" if isinstance(argument, (int, str)) else value.kind
    if isinstance(value, type):
        return getattr(value, "kind", value.__name__)
    if isinstance(value, torch.dtype):
        return str(value)
    if value is None or isinstance(value, (bool, int, float, str, bytes)):
        return value
    return str(type(value).__name__)


def listed(directory: Path) -> list[str]:
    """Return the names in a directory; an empty list if it is not a directory."""
    return sorted(os.listdir(directory)) if directory.is_dir() else []


def not_readable(directory: Path, found: str, fix: str) -> CheckpointError:
    """Return the error for an unsupported checkpoint of another program."""
    return CheckpointError(
        f"{directory} cannot be loaded: {found}.",
        rule="Megatron-LM checkpoints of the formats torch_dist and torch, and DeepSpeed's ZeRO "
        "checkpoints, are read",
        flags=["--load"],
        fix=fix,
    )


@dataclass(frozen=True, kw_only=True)
class CheckpointFormat:
    """A file format of checkpoints, of another program or of an extension of this one."""

    name: str
    """Value of `tools/checkpoint export --format`."""
    recognises: Callable[[Path], bool]
    """Returns, by the names in a directory, whether it holds such a checkpoint."""
    open: Callable[[Path], Contents]
    """Reads the description; tensors are read later, slice by slice."""
    write: Callable[[Contents, Path, bool], None] | None = None
    """Writes into an empty directory; the last argument includes the optimizer state."""
