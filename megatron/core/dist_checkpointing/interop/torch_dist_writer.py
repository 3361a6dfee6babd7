"""Write a checkpoint in Megatron-LM's `torch_dist` format, one tensor slice in memory at a time.

torch's distributed checkpointing writes the files. This module passes it the chunks (one per layer
of a stack, full tensors otherwise) and reads each chunk just before it is written.
"""

from __future__ import annotations

import contextlib
import io
import json
import re
import warnings
from argparse import Namespace
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.filesystem import FileSystemWriter
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    MetadataIndex,
    TensorProperties,
)
from torch.distributed.checkpoint.planner import (
    SavePlan,
    TensorWriteData,
    WriteItem,
    WriteItemType,
)
from torch.distributed.checkpoint.state_dict_saver import save as save_state_dict

from megatron.core.dist_checkpointing.durable import write_durably
from megatron.core.dist_checkpointing.flat_ranges import Box
from megatron.core.dist_checkpointing.interop.rank_state import FINAL_NORM_OF_HYBRID
from megatron.core.dist_checkpointing.loader import Contents, SliceReader, read_box
from megatron.core.dist_checkpointing.manifest import METADATA_NAME, StoredTensor
from megatron.core.dist_checkpointing.shard_file import DTYPES
from megatron.core.dist_checkpointing.shard_plan import ShardIndex

CHECKPOINT_VERSION = 3.0
_STACK = re.compile(r"(?:.*\.)?layers\.(?!\d)", re.ASCII)
_LINEAR = re.compile(r"(.*\.(?:linear_qkv|linear_proj|linear_fc1|linear_fc2))\.weight")
_OPTIMIZER = "optimizer.state."
_MAIN = _OPTIMIZER + "fp32_param."
_METADATA = {
    "sharded_backend": "torch_dist", "sharded_backend_version": 1,
    "common_backend": "torch", "common_backend_version": 1,
}  # fmt: skip


@dataclass(frozen=True)
class _Chunk:
    """A box of a stored tensor, to be written under a key of Megatron's."""

    tensor: StoredTensor
    box: Box


def write_torch_dist(contents: Contents, directory: Path, *, with_optimizer: bool = True) -> None:
    """Write the files of a checkpoint into an empty directory; this process alone.

    Args:
        with_optimizer: also write moments and main weights, where there are any, as the
            distributed optimizer stores them by parameter ("fully_reshardable").
    """
    chunks = _chunks(contents.manifest.tensors, with_optimizer=with_optimizer)
    common_state = contents.common_state()
    if getattr(common_state.get("args"), "hybrid_layer_pattern", None) is not None:
        theirs, own = FINAL_NORM_OF_HYBRID
        chunks = {key.replace(own, theirs): boxes for key, boxes in chunks.items()}
    with contents.open_reader() as reader:
        planner = _ChunkPlanner(chunks, reader)
        writer = FileSystemWriter(directory, single_file_per_rank=True, sync_files=True)
        with _quiet():
            save_state_dict(
                planner.declared(), storage_writer=writer, planner=planner, no_dist=True
            )
    common = io.BytesIO()
    torch.save(_common_state(common_state, chunks), common)
    write_durably(directory / "common.pt", common.getvalue())
    write_durably(directory / METADATA_NAME, json.dumps(_METADATA).encode())


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Suppress torch's warning that one process saves alone, which is intended."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


def _chunks(
    tensors: Mapping[str, StoredTensor], *, with_optimizer: bool
) -> dict[str, list[_Chunk]]:
    """Return the chunks of every tensor that is written, by Megatron's key."""
    found: dict[str, list[_Chunk]] = {}
    has_moments = any(key.startswith(_OPTIMIZER + "exp_avg.") for key in tensors)
    for key, tensor in tensors.items():
        if key.startswith(_OPTIMIZER):
            if with_optimizer:
                renamed = key.replace(_MAIN, _OPTIMIZER + "param.")
                found[renamed] = _cut(key, tensor)
            continue
        found[key] = _cut(key, tensor)
        if with_optimizer and has_moments and _MAIN + key not in tensors:
            # In an fp32 run the weights are the main weights.
            found[f"{_OPTIMIZER}param.{key}"] = _cut(key, tensor)
    return found


def _cut(key: str, tensor: StoredTensor) -> list[_Chunk]:
    shape = tensor.shape
    if _STACK.match(key.removeprefix(_OPTIMIZER)) is None or not shape:
        return [_Chunk(tensor, ((0,) * len(shape), shape))]
    rest = (0,) * (len(shape) - 1)
    return [_Chunk(tensor, ((i, *rest), (1, *shape[1:]))) for i in range(shape[0])]


class _ChunkPlanner(DefaultSavePlanner):
    """Passes the chunks to torch's writer, and reads each chunk when torch writes it."""

    def __init__(self, chunks: Mapping[str, list[_Chunk]], reader: SliceReader) -> None:
        super().__init__(flatten_state_dict=False)
        self.chunks, self.reader = chunks, reader
        self.by_index: dict[MetadataIndex, _Chunk] = {}
        self.indices = {id(c.tensor): ShardIndex(c.tensor) for cs in chunks.values() for c in cs}

    def declared(self) -> dict[str, Any]:
        """Return the plain values: Megatron's linear layers have an empty extra state."""
        return {
            f"{match[1]}._extra_state/shard_{i}_{len(chunks)}": [None]
            for key, chunks in self.chunks.items()
            if (match := _LINEAR.fullmatch(key)) and not key.startswith("optimizer.")
            for i in range(len(chunks))
        }

    def create_local_plan(self) -> SavePlan:
        plan = super().create_local_plan()
        items = list(plan.items)
        for key, chunks in self.chunks.items():
            for number, chunk in enumerate(chunks):
                offset, sizes = (torch.Size(part) for part in chunk.box)
                index = MetadataIndex(key, offset, number)
                self.by_index[index] = chunk
                described = TensorWriteData(
                    chunk=ChunkStorageMetadata(offset, sizes),
                    properties=TensorProperties(dtype=DTYPES[chunk.tensor.dtype]),
                    size=torch.Size(chunk.tensor.shape),
                )
                items.append(WriteItem(index, WriteItemType.SHARD, tensor_data=described))
        self.plan = SavePlan(items)
        return self.plan

    def resolve_data(self, write_item: WriteItem) -> Tensor | io.BytesIO:
        chunk = self.by_index.get(write_item.index)
        if chunk is None:
            return super().resolve_data(write_item)
        into = torch.empty(chunk.box[1], dtype=DTYPES[chunk.tensor.dtype])
        read_box(self.indices[id(chunk.tensor)], chunk.box, self.reader, into)
        return into


def _common_state(state: Mapping[str, Any], chunks: Mapping[str, list[_Chunk]]) -> dict[str, Any]:
    """Return Megatron's plain state."""
    args = state.get("args")
    run = dict(vars(args)) if isinstance(args, Namespace) else {}
    for name in ("consumed_train_samples", "consumed_valid_samples", "skipped_train_samples"):
        if name in state:
            run[name] = state[name]
    common: dict[str, Any] = {
        "args": Namespace(**run),
        "checkpoint_version": CHECKPOINT_VERSION,
        "iteration": int(state.get("iteration", 0)),
        "num_floating_point_operations_so_far": state.get(
            "num_floating_point_operations_so_far", 0.0
        ),
        "content_metadata": {"distrib_optim_sharding_type": "fully_reshardable"},
    }
    if "opt_param_scheduler" in state:
        common["opt_param_scheduler"] = state["opt_param_scheduler"]
    if any(key.startswith(_OPTIMIZER) for key in chunks):
        common["optimizer"] = _optimizer_state(state.get("optimizer"))
    return common


def _optimizer_state(own: Any) -> dict[str, Any]:
    """Return settings and counters of the optimizer in Megatron's form."""
    while isinstance(own, dict) and "param_groups" not in own and own:
        own = next(iter(own.values()))  # a chain: its groups share the step
    own = own if isinstance(own, dict) else {}
    step = own.get("state", {}).get("step", 0)
    groups = [
        {"is_expert_parallel": False, "is_decoupled_lr": False, **group, "step": float(step)}
        for group in own.get("param_groups", ())
    ]
    found: dict[str, Any] = {
        "optimizer": {"param_groups": groups},
        "param_state_sharding_type": "fully_reshardable",
    }
    if own.get("grad_scaler"):
        scaler = dict(own["grad_scaler"])
        scaler["scale"] = torch.tensor([float(scaler["scale"])])
        found["grad_scaler"] = scaler
    return found
