"""Stream the weights of a running model as Hugging Face tensors, without files.

In reinforcement learning, a generator in another process receives these weights after each update
of the policy. The tensors equal the tensors of an export (`writing`) bit for bit, in any layout.
Each tensor is collected, when the caller takes it, from the ranks that hold parts of it.
"""

from __future__ import annotations

import math
from argparse import Namespace
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from megatron.core.dist_checkpointing.collective import run_collectively
from megatron.core.dist_checkpointing.flat_ranges import Box
from megatron.core.dist_checkpointing.loader import Contents, narrow_to
from megatron.core.dist_checkpointing.manifest import Manifest, StoredTensor
from megatron.core.dist_checkpointing.mapping import (
    ShardedStateDict,
)
from megatron.core.dist_checkpointing.shard_file import DTYPES
from megatron.core.dist_checkpointing.shard_plan import (
    ReadItem,
    ShardMetadata,
    split_state,
    stored_tensors,
)
from megatron.core.foundation.errors import ConfigError
from megatron.core.process_groups_config import ProcessGroupCollection, resolve_groups
from megatron.core.topology.group import Group
from megatron.core.transformer.sharded_state import sharded_state_dict_of
from megatron.core.transport import torch_collectives
from megatron.core.transport.object_collectives import control_group
from megatron.core.utils import as_list
from megatron.hugging_face.families import family_of_settings
from megatron.hugging_face.model_description import ModelDescription
from megatron.hugging_face.stored import stored_adapters
from megatron.hugging_face.writing import described, num_bytes, plan, tensors

MOST_TRANSFER_BYTES = 1 << 26
"""Upper limit of a message; larger messages are not faster."""


def stream_weights(
    model: nn.Module | Sequence[nn.Module],
    settings: Mapping[str, Any],
    *,
    bucket_bytes: int = 1 << 30,
    dtype: torch.dtype | None = None,
    process_group: Group | None = None,
    pg_collection: ProcessGroupCollection | None = None,
) -> Iterator[dict[str, Tensor]]:
    """Yield the model's weights under Hugging Face's names, in buckets; the same on all ranks.

    All ranks of `process_group` must take all buckets, and must not change weights in between. In
    addition to the caller's bucket, the stream holds at most `bucket_bytes`: release each bucket
    before you take the next but one. A tensor larger than a bucket is a bucket of its own.

    Args:
        model: this rank's model chunk, or its list of chunks, as trained. Adapters are merged one
            parameter at a time, which needs copies of this parameter.
        settings: of the run, by Megatron's names: `vars(get_args())`.
        bucket_bytes: size of a bucket, including the messages that fill it.
        dtype: of the tensors; None keeps the dtype of the weights.
        process_group: ranks that together hold the whole model; None is all ranks.
        pg_collection: None is the current collection.
    Communication:
        a gather and a broadcast of declarations; then broadcasts on `process_group`, each of at
        most an eighth of a bucket.
    Raises:
        ConfigError: no family of Hugging Face can express the model.
        CheckpointError: weights are missing.
    """
    if bucket_bytes < 1:
        raise ConfigError(
            f"bucket_bytes={bucket_bytes} is too small.",
            rule="a bucket has at least one byte",
            fix="leave it out for 1 GiB",
        )
    groups, group = resolve_groups(pg_collection), process_group or torch_collectives.world()
    state = {
        f"model{number}": sharded_state_dict_of(chunk, pg_collection=groups)
        for number, chunk in enumerate(as_list(model))
    }
    transfer_bytes = min(max(bucket_bytes // 8, 1), MOST_TRANSFER_BYTES)
    contents = open_live(state, settings, group=group, transfer_bytes=transfer_bytes)
    description = ModelDescription.from_values(settings)
    planned = plan(contents, family_of_settings(description), description)
    adapters = stored_adapters(contents) if settings.get("lora_rank") else None
    found = tensors(contents, planned, adapters, dtype)
    bucket: dict[str, Tensor] = {}
    size = 0
    for entry in described(planned, dtype):
        length = num_bytes(entry)
        if bucket and size + length > bucket_bytes - transfer_bytes:
            yield bucket
            bucket, size = {}, 0
        bucket[entry[0]] = next(found)
        size += length
    yield bucket


@dataclass
class LiveContents(Contents):
    """The state dicts of all ranks, as an opened checkpoint; `Shard.file` is the owner's rank."""

    held: list[Tensor]
    """The boxes that this rank holds; `Shard.begin` is the index."""
    group: Group
    settings: Mapping[str, Any]
    transfer_bytes: int
    """Most bytes of a broadcast."""

    reads_rows: ClassVar[bool] = True

    @property
    def device(self) -> torch.device:
        """The device of this rank's part of the model."""
        return self.held[0].device if self.held else torch_collectives.tensor_device(self.group)

    def common_state(self) -> dict[str, Any]:
        """Return the settings in the form of a checkpoint."""
        return {"args": Namespace(**self.settings)}

    def open_reader(self) -> LiveReader:
        """Return a reader, a context manager. Every read is a collective on `group`."""
        return LiveReader(self)


def open_live(
    state: ShardedStateDict,
    settings: Mapping[str, Any],
    *,
    group: Group,
    transfer_bytes: int = 1 << 24,
) -> LiveContents:
    """Open a sharded state dict: agree on the rank that sends each shard. Collective.

    Args:
        state: declarations with their data, as for a save; the data are read later.
        settings: of the run, by Megatron's names.
        group: ranks that together hold all of the state.
        transfer_bytes: most bytes of one broadcast, and of its buffer.
    Communication:
        a gather of the declarations on the first rank of `group`, a broadcast of the plan.
    Raises:
        CheckpointError: on all ranks, if the declarations do not cover every tensor.
    """
    peers = control_group(group)
    shards = split_state(state, with_common=False).shards
    gathered = peers.gather([ShardMetadata.of(shard) for shard in shards])

    def decide() -> dict[str, StoredTensor]:
        return {} if gathered is None else stored_tensors(gathered, spread_over_replicas=True)

    tensors = peers.broadcast(run_collectively(peers, "reading the model's weights", decide))
    pieces = [view for shard in shards for _, view in shard.pieces() if view is not None]
    manifest = Manifest("", "", {}, tensors)
    place = Path("the running model")
    return LiveContents(place, manifest, {}, {}, pieces, group, settings, transfer_bytes)


class LiveReader:
    """Reads boxes from the ranks that hold them."""

    def __init__(self, contents: LiveContents) -> None:
        self.contents = contents
        self.bytes_read = 0

    def __enter__(self) -> LiveReader:
        return self

    def __exit__(self, *_: object) -> None:
        pass

    @torch.no_grad()
    def start(self, tensor: StoredTensor, read: ReadItem, into: Tensor) -> None:
        """Fill `into`: the shape of `read`, any device, any float dtype if floats are stored.

        Communication:
            broadcasts of at most `transfer_bytes` from the rank that holds the box.
        """
        contents, shard = self.contents, read.shard
        owner, dtype = int(shard.file), DTYPES[tensor.dtype]
        offset, shape = read.in_shard
        is_owner = contents.group.rank() == owner
        for begin, size in runs(shape, max(1, contents.transfer_bytes // dtype.itemsize)):
            target = narrow_to(into, (begin, size))
            piece = None
            if is_owner:
                corner = tuple(o + b for o, b in zip(offset, begin, strict=True))
                piece = narrow_to(contents.held[shard.begin], (corner, size))
            if contents.group.size() == 1:
                assert piece is not None
                target.copy_(piece)
                continue
            where = torch_collectives.tensor_device(contents.group)
            sent = torch.empty(size, dtype=dtype, device=where)
            if piece is not None:
                sent.copy_(piece)
            target.copy_(torch_collectives.broadcast(sent, contents.group, owner))
        self.bytes_read += math.prod(shape) * dtype.itemsize

    def finish(self) -> None:
        """Do nothing: `start` has already read."""


def runs(shape: tuple[int, ...], limit: int) -> Iterator[Box]:
    """Split a box of `shape` into boxes of at most `limit` elements, in memory order."""
    if math.prod(shape) <= limit or not shape:
        yield (0,) * len(shape), shape
        return
    inner = math.prod(shape[1:])
    if inner <= limit:
        step, rest = limit // inner, (0,) * (len(shape) - 1)
        for begin in range(0, shape[0], step):
            yield (begin, *rest), (min(step, shape[0] - begin), *shape[1:])
        return
    for row in range(shape[0]):
        for offset, size in runs(shape[1:], limit):
            yield (row, *offset), (1, *size)
