"""The state of a running model as if it were a checkpoint: its tensors are read from the ranks.

What reads checkpoints (an export to another format) reads this too, without a file: a box of a
tensor is broadcast by the ranks that hold parts of it. All ranks read the same boxes in the same
order, and all get them.
"""

from __future__ import annotations

import math
from argparse import Namespace
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import Tensor

from megatron.core.dist_checkpointing.collective import run_collectively
from megatron.core.dist_checkpointing.flat_ranges import Box
from megatron.core.dist_checkpointing.loader import Contents, narrow_to
from megatron.core.dist_checkpointing.manifest import Manifest, Shard, StoredTensor
from megatron.core.dist_checkpointing.mapping import (
    ShardedStateDict,
    ShardedTensor,
    ShardedTensorFactory,
)
from megatron.core.dist_checkpointing.planner import ReadItem, ShardMetadata, plan_save
from megatron.core.dist_checkpointing.shard_file import DTYPES
from megatron.core.dist_checkpointing.tree import leaves, map_leaves
from megatron.core.topology.group import Group
from megatron.core.transport import torch_collectives
from megatron.core.transport.object_collectives import control_group


@dataclass
class LiveContents(Contents):
    """State dicts of all ranks, opened. Shards are named after the rank that holds them."""

    held: list[Tensor]
    """The boxes that this rank holds; `Shard.begin` is the index."""
    group: Group
    settings: Mapping[str, Any]
    transfer_bytes: int
    """Most bytes of a broadcast."""

    reads_rows: ClassVar[bool] = True

    @property
    def device(self) -> torch.device:
        """Where this rank's part of the model is."""
        return self.held[0].device if self.held else torch_collectives.tensor_device(self.group)

    def common_state(self) -> dict[str, Any]:
        """Return the settings as a checkpoint has them."""
        return {"args": Namespace(**self.settings)}

    def open_reader(self) -> LiveReader:
        """Return what reads boxes; a context manager. Every read is a collective."""
        return LiveReader(self)


def open_live(
    state: ShardedStateDict,
    settings: Mapping[str, Any],
    *,
    group: Group,
    transfer_bytes: int = 1 << 24,
) -> LiveContents:
    """Agree on who holds what of a sharded state dict: collective.

    Args:
        state: declarations with their data, as for a save; the data are read later.
        settings: of the run, by Megatron's names.
        group: ranks that hold all of the state together.
        transfer_bytes: most bytes that are read at once, and held besides what is read into.
    Communication:
        a gather of the declarations on the first rank of `group`, a broadcast of the plan.
    Raises:
        CheckpointError: on all ranks, if the declarations do not make up every tensor.
    """
    peers = control_group(group)
    built = map_leaves(lambda x: x.build() if isinstance(x, ShardedTensorFactory) else x, state)
    shards = [leaf for _, leaf in leaves(built) if isinstance(leaf, ShardedTensor)]
    gathered = peers.gather([ShardMetadata.of(shard) for shard in shards])

    def decide() -> dict[str, StoredTensor]:
        return {} if gathered is None else _stored_tensors(gathered)

    tensors = peers.broadcast(run_collectively(peers, "reading the model's weights", decide))
    pieces = [view for shard in shards for _, view in shard.pieces() if view is not None]
    manifest = Manifest("", "", {}, tensors)
    place = Path("the running model")
    return LiveContents(place, manifest, {}, {}, pieces, group, settings, transfer_bytes)


def _stored_tensors(gathered: list[list[ShardMetadata]]) -> dict[str, StoredTensor]:
    """Describe every tensor with one holder for each of its boxes."""
    plan = plan_save(gathered, spread_over_replicas=True)
    shards: dict[str, list[Shard]] = {key: [] for key in plan.tensors}
    for rank, (declared, chosen) in enumerate(zip(gathered, plan.writes, strict=True)):
        begin = 0
        for index, shard in enumerate(declared):
            boxes = shard.boxes()
            if index in chosen:
                shards[shard.key] += [
                    Shard(offset, shape, str(rank), begin + number, ())
                    for number, (offset, shape) in enumerate(boxes)
                ]
            begin += len(boxes)
    return {
        key: StoredTensor(dtype, shape, tuple(shards[key]), is_padded)
        for key, (dtype, shape, is_padded) in plan.tensors.items()
    }


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
    def read(self, tensor: StoredTensor, read: ReadItem, into: Tensor) -> None:
        """Fill `into` (the shape of `read`, any float dtype for stored floats, any device).

        Communication:
            broadcasts of `transfer_bytes` at most from the rank that holds the box.
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

    def start(self, tensor: StoredTensor, read: ReadItem, into: Tensor) -> None:
        """Do as `read`."""
        self.read(tensor, read, into)

    def finish(self) -> None:
        """Wait for nothing: `start` has read."""


def runs(shape: tuple[int, ...], limit: int) -> Iterator[Box]:
    """Cut a box of `shape` into boxes of at most `limit` elements, in memory order."""
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
