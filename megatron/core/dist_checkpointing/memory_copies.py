"""Copies of the running state in host memory, which outlive the process groups.

    own copy         what this rank holds
    neighbour's      what a rank elsewhere holds and no rank at another place has: the shards of a
                     distributed optimizer, above all

After a rank has died the others make new process groups and read the state from these copies, in
any layout: whoever holds a box sends it to those that need it. Two iterations are kept, since a
rank may die while a copy is made: of the older one all ranks have everything. A place is a node,
or a rank where there is one node only. What is lost together with its only copies is lost: then
there is a checkpoint.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import groupby
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from megatron.core.dist_checkpointing import typed_json
from megatron.core.dist_checkpointing.flat_ranges import Box
from megatron.core.dist_checkpointing.loader import Contents, narrow_to
from megatron.core.dist_checkpointing.manifest import Manifest, Shard, StoredTensor
from megatron.core.dist_checkpointing.mapping import (
    ShardedObject,
    ShardedStateDict,
    ShardedTensor,
    ShardedTensorFactory,
)
from megatron.core.dist_checkpointing.planner import ReadItem, ShardMetadata, Unit, plan_save
from megatron.core.dist_checkpointing.shard_file import DTYPES, element_bytes, storage_order
from megatron.core.dist_checkpointing.snapshot import SnapshotBuffer
from megatron.core.dist_checkpointing.tree import ABSENT, leaves, map_leaves, prune
from megatron.core.topology.group import Group
from megatron.core.transport import torch_collectives
from megatron.core.transport.object_collectives import (
    all_gather_object,
    any_across_ranks,
    control_group,
)
from megatron.core.transport.work import Handle

_CHUNK_BYTES = 256 << 20
"""Largest message."""

Key = tuple[int, int]
"""(iteration, how often copies were begun anew): the greater one is newer."""
NamedBox = tuple[str, Box]


@dataclass
class _Copy:
    """One iteration in the memory of this process."""

    key: Key = (-1, -1)
    tensors: dict[str, StoredTensor] = field(default_factory=dict)
    """All tensors of the state, with the boxes that make them up; on every rank."""
    info: Mapping[str, Any] = field(default_factory=dict)
    common: Any = None
    """JSON form of the plain values."""
    objects: dict[str, Any] = field(default_factory=dict)
    held: dict[NamedBox, Tensor] = field(default_factory=dict)
    shared: SnapshotBuffer = field(default_factory=SnapshotBuffer)
    rest: SnapshotBuffer = field(default_factory=SnapshotBuffer)
    received: Tensor = field(default_factory=lambda: torch.empty(0, dtype=torch.uint8))


@dataclass(frozen=True)
class _Plan:
    """Who sends what to its neighbour; made once for a set of declarations."""

    tensors: dict[str, StoredTensor]
    to_send: list[int]
    """Indices into this rank's declarations."""
    coming: list[ShardMetadata]
    """Declarations of the rank from which this one receives."""
    distance: int


class MemoryCopies:
    """What this process keeps from one set of process groups to the next."""

    def __init__(self) -> None:
        self._copies = [_Copy(), _Copy()]
        self._num_begun = 0

    @property
    def num_bytes(self) -> int:
        """Host memory of all copies."""
        return sum(c.shared.num_bytes + c.rest.num_bytes + c.received.numel() for c in self._copies)

    def open(self, group: Group, place: int) -> CopiesOfGroup:
        """Return what makes and reads copies with the ranks of a group: collective.

        Args:
            group: all ranks; tensors of the host travel on it.
            place: number of this rank's node.
        """
        begun: list[int] = all_gather_object(self._num_begun, group)
        self._num_begun = 1 + max(begun)
        return CopiesOfGroup(self, group, place)

    def _oldest(self) -> _Copy:
        return min(self._copies, key=lambda copy: copy.key)

    def _find(self, key: Key) -> _Copy | None:
        return next((copy for copy in self._copies if copy.key == key), None)


class CopiesOfGroup:
    """Makes and reads copies with one set of ranks. Every public method is a collective."""

    def __init__(self, copies: MemoryCopies, group: Group, place: int) -> None:
        self._copies, self._group, self._place = copies, group, place
        self._peers = control_group(group)
        self._declared: list[ShardMetadata] = []
        self._plan: _Plan | None = None

    # Making ---------------------------------------------------------------------------------

    def save(self, state: ShardedStateDict, iteration: int, info: Mapping[str, Any]) -> None:
        """Copy the state as it is now, and send the neighbour what nobody else has.

        Communication:
            one all-reduce of a number; a message to a neighbour; where declarations have changed, a
            gather of them on the first rank and a scatter of what follows.
        """
        built = map_leaves(lambda x: x.build() if isinstance(x, ShardedTensorFactory) else x, state)
        shards = [leaf for _, leaf in leaves(built) if isinstance(leaf, ShardedTensor)]
        declared = [ShardMetadata.of(shard) for shard in shards]
        # Nobody gets past this before all have their earlier copy: the older of the two may go.
        if any_across_ranks(declared != self._declared or self._plan is None, self._group):
            self._declared, self._plan = declared, self._make_plan(declared)
        plan = self._plan
        assert plan is not None
        copy = self._copies._oldest()
        copy.key, copy.held = (-1, -1), {}
        chosen = set(plan.to_send)
        sent = [shards[i] for i in plan.to_send]
        names, tensors = _in_order(sent)
        copy.held.update(zip(names, copy.shared.copy_of(tensors), strict=True))
        others = [shard for i, shard in enumerate(shards) if i not in chosen]
        names, tensors = _in_order(others)
        copy.held.update(zip(names, copy.rest.copy_of(tensors), strict=True))
        self._exchange(plan, copy, sum(declared[i].num_bytes for i in plan.to_send))
        kinds = (ShardedTensor, ShardedObject, ShardedTensorFactory)
        plain = prune(map_leaves(lambda x: ABSENT if isinstance(x, kinds) else x, state))
        copy.common = typed_json.encode({} if plain is ABSENT else plain)
        objects = [leaf for _, leaf in leaves(built) if isinstance(leaf, ShardedObject)]
        copy.objects = {leaf.unique_key: leaf.data for leaf in objects}
        copy.tensors, copy.info = plan.tensors, info
        copy.key = (iteration, self._copies._num_begun)

    def _make_plan(self, declared: list[ShardMetadata]) -> _Plan:
        gathered = self._peers.gather((declared, self._place))
        answers = None
        if gathered is not None:
            declarations, places = map(list, zip(*gathered, strict=True))
            distance = neighbour_distance(places)
            to_send = only_copies(declarations, places)
            size = len(declarations)
            answers = [
                _Plan(
                    _whole_tensors(declarations),
                    to_send[rank],
                    [declarations[source][i] for i in to_send[source]],
                    distance,
                )
                for rank in range(size)
                for source in [(rank - distance) % size]
            ]
        plan: _Plan = self._peers.scatter(answers)
        return plan

    def _exchange(self, plan: _Plan, copy: _Copy, num_bytes: int) -> None:
        """Send what only this place has, and receive the same of another."""
        size, rank = self._peers.size, self._peers.rank
        coming = sum(shard.num_bytes for shard in plan.coming)
        if copy.received.numel() < coming:
            copy.received = torch.empty(coming, dtype=torch.uint8)
        handles: list[Handle] = []
        for begin in range(0, coming, _CHUNK_BYTES):
            part = copy.received[begin : min(begin + _CHUNK_BYTES, coming)]
            handles.append(
                torch_collectives.irecv(part, (rank - plan.distance) % size, self._group)
            )
        for begin in range(0, num_bytes, _CHUNK_BYTES):
            part = copy.shared.memory[begin : min(begin + _CHUNK_BYTES, num_bytes)]
            handles.append(
                torch_collectives.isend(part, (rank + plan.distance) % size, self._group)
            )
        for handle in handles:
            handle.wait()
        copy.held.update(_carve(copy.received, plan.coming))

    # Reading --------------------------------------------------------------------------------

    def newest(self) -> Key | None:
        """Return the newest iteration of which every box is in the memory of some rank."""
        mine = {c.key: (set(c.held), c.tensors) for c in self._copies._copies if c.key[0] >= 0}
        gathered = self._peers.gather(mine)
        best: Key | None = self._peers.broadcast(None if gathered is None else _choose(gathered))
        return best

    def contents(self, key: Key) -> MemoryContents:
        """Open what `newest` found."""
        copy = self._copies._find(key)
        mine = None if copy is None else (copy.tensors, copy.info, copy.common)
        objects = {} if copy is None else copy.objects
        names = set() if copy is None else set(copy.held)
        everything = all_gather_object((mine, objects, names), self._group)
        tensors, info, common = next(found for found, _, _ in everything if found is not None)
        merged: dict[str, Any] = {}
        for _, found, _ in everything:
            merged = {**found, **merged}
        holders: dict[NamedBox, list[int]] = {}
        for rank, (_, _, held) in enumerate(everything):
            for name in held:
                holders.setdefault(name, []).append(rank)
        located = {
            name: StoredTensor(
                tensor.dtype,
                tensor.shape,
                tuple(
                    Shard(s.offset, s.shape, ",".join(map(str, holders[name, s.box])), 0, ())
                    for s in tensor.shards
                ),
                tensor.is_padded,
            )
            for name, tensor in tensors.items()
        }
        forms = {name: typed_json.encode(value) for name, value in merged.items()}
        manifest = Manifest("", "", {}, located, info)
        place = Path(f"the memory of the ranks (iteration {key[0]})")
        held_here = {} if copy is None else copy.held
        return MemoryContents(place, manifest, common, forms, held_here, self._group)


def _choose(
    gathered: Sequence[Mapping[Key, tuple[set[NamedBox], dict[str, StoredTensor]]]],
) -> Key | None:
    """Return the newest key of which all boxes are held."""
    for key in sorted({key for found in gathered for key in found}, reverse=True):
        holders = [found[key] for found in gathered if key in found]
        held = set().union(*(boxes for boxes, _ in holders))
        needed = {(name, s.box) for name, t in holders[0][1].items() for s in t.shards}
        if needed <= held:
            return key
    return None


def neighbour_distance(places: Sequence[int]) -> int:
    """Return how many ranks away the holder of a rank's copy is: on another node, if there is one.

    Args:
        places: node of each rank; the ranks of a node follow each other.
    """
    largest = max(places.count(place) for place in places)
    return largest if largest < len(places) else 1 % len(places)


def only_copies(
    declared: Sequence[Sequence[ShardMetadata]], places: Sequence[int]
) -> list[list[int]]:
    """Return, for each rank, which of its shards no rank at another place holds.

    Of the ranks of one place the first one that holds a shard sends it.
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


def _whole_tensors(declared: Sequence[Sequence[ShardMetadata]]) -> dict[str, StoredTensor]:
    """Describe every tensor by boxes that make it up."""
    plan = plan_save(declared, spread_over_replicas=False)
    shards: dict[str, list[Shard]] = {key: [] for key in plan.tensors}
    for rank, writes in enumerate(plan.writes):
        for index in writes:
            for offset, shape in declared[rank][index].boxes():
                shards[declared[rank][index].key].append(Shard(offset, shape, "", 0, ()))
    return {
        key: StoredTensor(dtype, shape, tuple(shards[key]), is_padded)
        for key, (dtype, shape, is_padded) in plan.tensors.items()
    }


def _in_order(shards: Sequence[ShardedTensor]) -> tuple[list[NamedBox], list[Tensor]]:
    """Return names and tensors of all boxes, as a snapshot wants them."""
    pieces = [((s.key, box), view) for s in shards for box, view in s.pieces() if view is not None]
    order = _order([ShardMetadata.of(s) for s in shards])
    return [pieces[i][0] for i in order], [pieces[i][1] for i in order]


def _order(declared: Sequence[ShardMetadata]) -> list[int]:
    """Return in which order the boxes of declarations are stored in a snapshot."""
    boxes = [(d.dtype, shape) for d in declared for _, shape in d.boxes()]
    sizes = [math.prod(shape) * element_bytes(dtype) for dtype, shape in boxes]
    return storage_order([dtype for dtype, _ in boxes], sizes)


def _carve(memory: Tensor, declared: Sequence[ShardMetadata]) -> dict[NamedBox, Tensor]:
    """Return the boxes of declarations in `memory` [bytes], stored as in a snapshot."""
    boxes = [(d.key, d.dtype, box) for d in declared for box in d.boxes()]
    found, begin = {}, 0
    for index in _order(declared):
        key, dtype, box = boxes[index]
        size = math.prod(box[1]) * element_bytes(dtype)
        found[key, box] = memory[begin : begin + size].view(DTYPES[dtype]).view(box[1])
        begin += size
    return found


@dataclass
class MemoryContents(Contents):
    """Copies of all ranks, opened. The file of a shard is the list of ranks that hold it."""

    held: Mapping[NamedBox, Tensor]
    group: Group

    def common_state(self) -> dict[str, Any]:
        """Return the plain values that were copied."""
        state: dict[str, Any] = typed_json.decode(self.common)
        return state

    def open_reader(self) -> MemoryReader:
        """Return what reads boxes; a context manager. `finish` is a collective."""
        return MemoryReader(self)


@dataclass(frozen=True)
class _Request:
    """Part of a box that another rank holds."""

    name: NamedBox
    part: Box
    dtype: str

    @property
    def num_bytes(self) -> int:
        return math.prod(self.part[1]) * element_bytes(self.dtype)


class MemoryReader:
    """Reads boxes from the ranks that hold them, all at once in `finish`."""

    def __init__(self, contents: MemoryContents) -> None:
        self.contents = contents
        self.bytes_read = 0
        self._keys = {id(t): key for key, t in contents.manifest.tensors.items()}
        self._wanted: list[tuple[int, _Request, Tensor]] = []

    def __enter__(self) -> MemoryReader:
        return self

    def __exit__(self, *_: object) -> None:
        pass

    @torch.no_grad()
    def read(self, tensor: StoredTensor, read: ReadItem, into: Tensor) -> None:
        """Fill `into` from this rank's own memory; see `start` for what others hold."""
        name = (self._keys[id(tensor)], read.shard.box)
        into.copy_(narrow_to(self.contents.held[name], read.in_shard))
        self.bytes_read += into.numel() * element_bytes(tensor.dtype)

    def start(self, tensor: StoredTensor, read: ReadItem, into: Tensor) -> None:
        """Read what this rank has, and ask for the rest."""
        name = (self._keys[id(tensor)], read.shard.box)
        if name in self.contents.held:
            self.read(tensor, read, into)
            return
        holders = [int(rank) for rank in read.shard.file.split(",")]
        holder = holders[self.contents.group.rank() % len(holders)]
        self._wanted.append((holder, _Request(name, read.in_shard, tensor.dtype), into))

    @torch.no_grad()
    def finish(self) -> None:
        """Exchange what is asked for.

        Communication:
            an all-gather of the requests; one message from each holder to each rank that asks.
        """
        group, held = self.contents.group, self.contents.held
        self._wanted.sort(key=lambda wanted: wanted[0])
        mine = [(holder, request) for holder, request, _ in self._wanted]
        asked: list[list[tuple[int, _Request]]] = all_gather_object(mine, group)
        handles: list[Handle] = []
        arrived: dict[int, Tensor] = {}
        for holder, requests in groupby(mine, key=lambda request: request[0]):
            total = sum(request.num_bytes for _, request in requests)
            arrived[holder] = torch.empty(total, dtype=torch.uint8)
            handles.append(torch_collectives.irecv(arrived[holder], holder, group))
        for rank, requests_of_rank in enumerate(asked):
            parts = [
                narrow_to(held[request.name], request.part).contiguous().view(-1).view(torch.uint8)
                for holder, request in requests_of_rank
                if holder == group.rank()
            ]
            if parts:
                handles.append(torch_collectives.isend(torch.cat(parts), rank, group))
        for handle in handles:
            handle.wait()
        begins = dict.fromkeys(arrived, 0)
        for holder, request, into in self._wanted:
            begin = begins[holder]
            begins[holder] += request.num_bytes
            data = arrived[holder][begin : begins[holder]].clone()  # aligned for its type
            into.copy_(data.view(DTYPES[request.dtype]).view(request.part[1]))
            self.bytes_read += request.num_bytes
