"""Plans of saves and loads: which rank writes and reads which boxes. Index arithmetic only.

Saving: every rank declares its shards, the coordinator checks that they make up each tensor
exactly once and gives each shard to one of its holders, so that each byte is written once and the
replicas share the work. Loading: a rank intersects the boxes it needs with the stored ones.
"""

from __future__ import annotations

import bisect
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from megatron.core.dist_checkpointing import typed_json
from megatron.core.dist_checkpointing.flat_ranges import (
    Box,
    boxes_of_flat_range,
    coverage_problem,
    describe_box,
    intersection,
)
from megatron.core.dist_checkpointing.manifest import Shard, StoredTensor
from megatron.core.dist_checkpointing.mapping import (
    LocalNonpersistentObject,
    ShardedObject,
    ShardedStateDict,
    ShardedTensor,
    ShardedTensorFactory,
    is_main_replica,
)
from megatron.core.dist_checkpointing.shard_file import dtype_name, element_bytes
from megatron.core.dist_checkpointing.tree import ABSENT, leaves, map_leaves, prune
from megatron.core.foundation.errors import CheckpointError


@dataclass
class LocalState:
    """The local part of a rank's state."""

    shards: list[ShardedTensor] = field(default_factory=list)
    objects: dict[str, Any] = field(default_factory=dict)
    """unique key -> JSON form."""
    common: Any = None
    """JSON form of the plain values."""


def split_state(
    state: ShardedStateDict, *, with_common: bool, with_replicas: bool = False
) -> LocalState:
    """Separate tensors, objects and plain values; factories are built.

    Args:
        with_common: encode the plain values.
        with_replicas: encode objects also on ranks that hold another replica than the main one.
    """
    local = LocalState()
    for _, leaf in leaves(
        map_leaves(lambda x: x.build() if isinstance(x, ShardedTensorFactory) else x, state)
    ):
        if isinstance(leaf, ShardedTensor):
            if leaf.data is None:
                raise CheckpointError(f"{leaf.key!r} is declared without data.")
            local.shards.append(leaf)
        elif isinstance(leaf, ShardedObject) and (
            with_replicas or is_main_replica(leaf.replica_id)
        ):
            local.objects[leaf.unique_key] = typed_json.encode(leaf.data, where=leaf.key)
    if with_common:
        kinds = (ShardedTensor, ShardedObject, ShardedTensorFactory, LocalNonpersistentObject)
        plain = prune(map_leaves(lambda x: ABSENT if isinstance(x, kinds) else x, state))
        local.common = typed_json.encode({} if plain is ABSENT else plain)
    return local


@dataclass(frozen=True)
class ShardMetadata:
    """The declaration of a shard without data, which a rank sends to the coordinator."""

    key: str
    dtype: str
    global_shape: tuple[int, ...]
    offset: tuple[int, ...]
    shape: tuple[int, ...]
    flat_bounds: tuple[int, int] | None
    is_main: bool
    is_padded: bool

    @staticmethod
    def of(shard: ShardedTensor) -> ShardMetadata:
        """Describe a sharded tensor."""
        offset, shape = shard.box
        return ShardMetadata(
            shard.key,
            dtype_name(shard.dtype),
            shard.global_shape,
            offset,
            shape,
            None if shard.flattened_range is None else shard.flat_bounds,
            is_main_replica(shard.replica_id),
            shard.allow_shape_mismatch,
        )

    def boxes(self) -> list[Box]:
        """The plain boxes of the global tensor that the rank holds, as `ShardedTensor.pieces`."""
        if self.flat_bounds is None:
            return [(self.offset, self.shape)]
        return [
            (tuple(g + o for g, o in zip(self.offset, offset, strict=True)), shape)
            for offset, shape in boxes_of_flat_range(self.shape, *self.flat_bounds)
        ]

    @property
    def num_bytes(self) -> int:
        """Bytes of the shard."""
        begin, end = self.flat_bounds or (0, math.prod(self.shape))
        return (end - begin) * element_bytes(self.dtype)


Unit = tuple[str, tuple[int, ...], tuple[int, ...], tuple[int, int] | None]
"""A distinct shard: key, offset, shape, flat bounds."""


@dataclass(frozen=True)
class SavePlan:
    """The coordinator's decision."""

    writes: list[list[int]]
    """Per rank: indices into its declarations that it writes."""
    tensors: dict[str, tuple[str, tuple[int, ...], bool]]
    """key -> (dtype, global shape, is_padded)."""
    bytes_per_rank: list[int]


def plan_save(
    declared: Sequence[Sequence[ShardMetadata]], *, spread_over_replicas: bool
) -> SavePlan:
    """Assign every distinct shard to one of its holders.

    Args:
        declared: per rank, its declarations.
        spread_over_replicas: balance bytes over all holders; otherwise the main replica writes.
    Raises:
        CheckpointError: ranks contradict each other, or the shards do not make up a tensor.
    """
    tensors: dict[str, tuple[str, tuple[int, ...], bool]] = {}
    first_rank: dict[str, int] = {}
    holders: dict[Unit, list[tuple[int, int]]] = {}
    mains: dict[Unit, list[tuple[int, int]]] = {}
    for rank, shards in enumerate(declared):
        for index, d in enumerate(shards):
            metadata = (d.dtype, d.global_shape, d.is_padded)
            if tensors.setdefault(d.key, metadata) != metadata:
                raise CheckpointError(
                    f"ranks {first_rank[d.key]} and {rank} declare {d.key!r} differently: "
                    f"{tensors[d.key][:2]} and {metadata[:2]} (dtype, global shape).",
                    rule="a key means one tensor on all ranks",
                )
            first_rank.setdefault(d.key, rank)
            unit = (d.key, d.offset, d.shape, d.flat_bounds)
            holders.setdefault(unit, []).append((rank, index))
            if d.is_main:
                mains.setdefault(unit, []).append((rank, index))
    _check_mains(holders, mains)
    _check_coverage(declared, tensors, mains)
    loads = [0] * len(declared)
    writes: list[list[int]] = [[] for _ in declared]
    sizes = {unit: declared[h[0][0]][h[0][1]].num_bytes for unit, h in holders.items()}

    # Shards without a choice first, then the largest: the usual greedy balance.
    def urgency(unit: Unit) -> tuple[bool, int, Any]:
        return len({rank for rank, _ in holders[unit]}) > 1, -sizes[unit], unit[:3]

    for unit in sorted(holders, key=urgency):
        choices = holders[unit] if spread_over_replicas else mains[unit]
        rank, index = min(choices, key=lambda choice: (loads[choice[0]], choice))
        writes[rank].append(index)
        loads[rank] += sizes[unit]
    return SavePlan([sorted(w) for w in writes], tensors, loads)


def stored_tensors(
    declared: Sequence[Sequence[ShardMetadata]], *, spread_over_replicas: bool
) -> dict[str, StoredTensor]:
    """Describe every tensor by its boxes, each with one holder.

    The file of a shard is its rank; its first byte is the number of the box on that rank.
    """
    plan = plan_save(declared, spread_over_replicas=spread_over_replicas)
    shards: dict[str, list[Shard]] = {key: [] for key in plan.tensors}
    for rank, (own, chosen) in enumerate(zip(declared, plan.writes, strict=True)):
        number = 0
        for index, shard in enumerate(own):
            boxes = shard.boxes()
            if index in chosen:
                shards[shard.key] += [
                    Shard(offset, shape, str(rank), number + i, ())
                    for i, (offset, shape) in enumerate(boxes)
                ]
            number += len(boxes)
    return {
        key: StoredTensor(dtype, shape, tuple(shards[key]), is_padded)
        for key, (dtype, shape, is_padded) in plan.tensors.items()
    }


def neighbour_distance(places: Sequence[int]) -> int:
    """Return the distance in ranks to the holder of a rank's copy: if possible on another node.

    Args:
        places: node of each rank; the ranks of a node follow each other.
    """
    largest = max(places.count(place) for place in places)
    return largest if largest < len(places) else 1 % len(places)


def only_copies(
    declared: Sequence[Sequence[ShardMetadata]], places: Sequence[int]
) -> list[list[int]]:
    """Return, for each rank, which of its shards no rank at another place holds.

    If several ranks of a place hold a shard, the first of them sends it.
    """
    if len(set(places)) == 1:
        places = range(len(places))
    at: dict[Unit, set[int]] = {}
    first: dict[Unit, tuple[int, int]] = {}
    for rank, shards in enumerate(declared):
        for index, shard in enumerate(shards):
            unit = (shard.key, shard.offset, shard.shape, shard.flat_bounds)
            at.setdefault(unit, set()).add(places[rank])
            first.setdefault(unit, (rank, index))
    chosen: list[list[int]] = [[] for _ in declared]
    for unit, found in at.items():
        if len(found) == 1 and len(declared) > 1:
            rank, index = first[unit]
            chosen[rank].append(index)
    return chosen


def _check_mains(
    holders: dict[Unit, list[tuple[int, int]]], mains: dict[Unit, list[tuple[int, int]]]
) -> None:
    for unit, held_by in holders.items():
        count = len(mains.get(unit, ()))
        if count == 1:
            continue
        key, offset, shape, flat = unit
        ranks = sorted({rank for rank, _ in (mains.get(unit) or held_by)})
        what = f"shard {describe_box((offset, shape))}" + (f" range {flat}" if flat else "")
        claim = "no rank declares it as the main replica" if count == 0 else "several do"
        raise CheckpointError(
            f"{what} of {key!r} is held by ranks {ranks}: {claim}.",
            rule="each shard has exactly one replica with replica_id 0",
            fix="number the copies of a shard: replica_id=(0, 0, data_parallel_rank)",
        )


def _check_coverage(
    declared: Sequence[Sequence[ShardMetadata]],
    tensors: dict[str, tuple[str, tuple[int, ...], bool]],
    mains: dict[Unit, list[tuple[int, int]]],
) -> None:
    boxes: dict[str, list[Box]] = {key: [] for key in tensors}
    for unit, ((rank, index), *_) in mains.items():
        boxes[unit[0]] += declared[rank][index].boxes()
    for key, (_, shape, _) in tensors.items():
        problem = coverage_problem(shape, boxes[key])
        if problem is not None:
            raise CheckpointError(
                f"the shards of {key!r} do not make up the tensor: {problem}.",
                rule="the main replicas of all ranks hold every element exactly once",
            )


@dataclass(frozen=True)
class ReadItem:
    """Part of a stored shard that a rank needs."""

    shard: Shard
    in_shard: Box
    """Box relative to the shard's corner."""
    in_wanted: Box
    """The same elements relative to the wanted box's corner."""


class ShardIndex:
    """The shards of one stored tensor, indexed by box."""

    def __init__(self, tensor: StoredTensor) -> None:
        self.tensor = tensor
        self.shards = sorted(tensor.shards, key=lambda s: s.offset[:1])
        self.starts = [s.offset[0] if s.offset else 0 for s in self.shards]
        self.longest = max((s.shape[0] if s.shape else 1 for s in self.shards), default=0)

    def reads(self, wanted: Box) -> Iterator[ReadItem]:
        """Yield the parts of stored shards that make up `wanted` (clipped to the tensor)."""
        begin, length = (wanted[0][0], wanted[1][0]) if wanted[0] else (0, 1)
        low = bisect.bisect_right(self.starts, begin - self.longest)
        high = bisect.bisect_left(self.starts, begin + length)
        for shard in self.shards[low:high]:
            shared = intersection(shard.box, wanted)
            if shared is not None:
                yield ReadItem(shard, _relative(shared, shard.offset), _relative(shared, wanted[0]))


def _relative(box: Box, corner: Sequence[int]) -> Box:
    return tuple(o - c for o, c in zip(box[0], corner, strict=True)), box[1]
