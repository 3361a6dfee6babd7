"""Copies of the running state in host memory, which outlive the process groups.

    own copy            the shards of this rank
    neighbour's copy    shards of a rank at another place, unless a third place holds them too:
                        above all the shards of a distributed optimizer

After a rank has died, the others make new process groups and read the state from these copies, in
any layout: the holder of a box sends it to the ranks that need it. Two iterations are kept, because
a rank may die during a copy; the older one is then complete. A place is a node, or a rank if there
is only one node. If all copies of a shard are lost, the run needs a checkpoint.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import groupby
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from megatron.core.dist_checkpointing.collective import as_checkpoint_error, run_collectively
from megatron.core.dist_checkpointing.flat_ranges import Box
from megatron.core.dist_checkpointing.loader import Contents, narrow_to
from megatron.core.dist_checkpointing.manifest import Manifest, StoredTensor
from megatron.core.dist_checkpointing.mapping import ShardedStateDict, ShardedTensor
from megatron.core.dist_checkpointing.shard_file import DTYPES, element_bytes, storage_order
from megatron.core.dist_checkpointing.shard_plan import (
    LocalState,
    ReadItem,
    ShardMetadata,
    neighbour_distance,
    only_copies,
    split_state,
    stored_tensors,
)
from megatron.core.dist_checkpointing.snapshot import SnapshotBuffer
from megatron.core.topology.group import Group
from megatron.core.transport import torch_collectives
from megatron.core.transport.object_collectives import (
    all_gather_object,
    any_across_ranks,
    control_group,
    raise_on_all_ranks,
)
from megatron.core.transport.work import Handle

_CHUNK_BYTES = 256 << 20
"""Largest message."""

Key = tuple[int, int]
"""(iteration, number of restarts of the copies): the greater one is newer."""
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
    """The shards that each rank sends to its neighbour; made once for a set of declarations."""

    tensors: dict[str, StoredTensor]
    to_send: list[int]
    """Indices into this rank's declarations."""
    coming: list[ShardMetadata]
    """Declarations of the rank that sends to this rank."""
    distance: int


class MemoryCopies:
    """Copies in this process, which remain when process groups are replaced."""

    def __init__(self) -> None:
        self.copies = [_Copy(), _Copy()]
        self.num_begun = 0

    @property
    def num_bytes(self) -> int:
        """Host memory of all copies."""
        return sum(c.shared.num_bytes + c.rest.num_bytes + c.received.numel() for c in self.copies)

    def open(self, group: Group, place: int) -> CopiesOfGroup:
        """Return the copies shared with the ranks of a group, to make and to read: collective.

        Args:
            group: all ranks; it sends tensors in host memory.
            place: number of this rank's node.
        """
        begun: list[int] = all_gather_object(self.num_begun, group)
        self.num_begun = 1 + max(begun)
        return CopiesOfGroup(self, group, place)


class CopiesOfGroup:
    """Makes and reads copies with one set of ranks. Every public method is a collective."""

    def __init__(self, copies: MemoryCopies, group: Group, place: int) -> None:
        self._copies, self._group, self._place = copies, group, place
        self._peers = control_group(group)
        self._declared: list[ShardMetadata] = []
        self._plan: _Plan | None = None

    # Making ---------------------------------------------------------------------------------

    def save(
        self, state: Callable[[], ShardedStateDict], iteration: int, info: Mapping[str, object]
    ) -> None:
        """Copy the current state, and send the neighbour the shards that no other place holds.

        Args:
            state: declares this rank's state.
        Raises:
            CheckpointError: on every rank, if one cannot copy; the earlier copy is intact.
        Communication:
            two agreements on errors, one all-reduce of a number, and a message to a neighbour; if
            declarations have changed, a gather of them on the first rank and a scatter of the plan.
        """

        def declare() -> tuple[LocalState, list[ShardMetadata]]:
            local = split_state(state(), with_common=True, with_replicas=True)
            return local, [ShardMetadata.of(shard) for shard in local.shards]

        local, declared = run_collectively(self._peers, "declaring the state to copy", declare)
        shards = local.shards
        # A rank passes this only when all ranks have finished their earlier copy, so the older of
        # the two may be overwritten.
        if any_across_ranks(declared != self._declared or self._plan is None, self._group):
            self._declared, self._plan = declared, self._make_plan(declared)
        plan = self._plan
        assert plan is not None

        def fill() -> tuple[_Copy, Tensor, Tensor]:
            copy = min(self._copies.copies, key=lambda copy: copy.key)
            copy.key, copy.held = (-1, -1), {}
            chosen = set(plan.to_send)
            others = [shard for i, shard in enumerate(shards) if i not in chosen]
            for memory, part in ((copy.shared, [shards[i] for i in plan.to_send]),
                                 (copy.rest, others)):  # fmt: skip
                names, tensors = _in_order(part)
                copy.held.update(zip(names, memory.copy_of(tensors), strict=True))
            coming = sum(shard.num_bytes for shard in plan.coming)
            if copy.received.numel() < coming:
                copy.received = torch.empty(coming, dtype=torch.uint8)
            copy.held.update(_carve(copy.received, plan.coming))
            leaving = sum(declared[i].num_bytes for i in plan.to_send)
            return copy, copy.received[:coming], copy.shared.memory[:leaving]

        copy, coming, leaving = run_collectively(self._peers, "copying the state", fill)
        self._exchange(plan, coming, leaving)
        copy.common, copy.objects = local.common, local.objects
        copy.tensors, copy.info = plan.tensors, info
        copy.key = (iteration, self._copies.num_begun)

    def _make_plan(self, declared: list[ShardMetadata]) -> _Plan:
        gathered = self._peers.gather((declared, self._place))

        def decide() -> list[_Plan] | None:
            if gathered is None:
                return None
            declarations, places = map(list, zip(*gathered, strict=True))
            distance = neighbour_distance(places)
            to_send = only_copies(declarations, places)
            size = len(declarations)
            tensors = stored_tensors(declarations, spread_over_replicas=False)
            return [
                _Plan(
                    tensors,
                    to_send[rank],
                    [declarations[source][i] for i in to_send[source]],
                    distance,
                )
                for rank in range(size)
                for source in [(rank - distance) % size]
            ]

        answers = run_collectively(self._peers, "planning copies of the state", decide)
        plan: _Plan = self._peers.scatter(answers)
        return plan

    def _exchange(self, plan: _Plan, coming: Tensor, leaving: Tensor) -> None:
        """Send the bytes [bytes] that only this place holds, and receive a neighbour's bytes."""
        size, rank = self._peers.size, self._peers.rank
        handles: list[Handle] = []
        for start, data, other in (
            (torch_collectives.irecv, coming, rank - plan.distance),
            (torch_collectives.isend, leaving, rank + plan.distance),
        ):
            for part in data.split(_CHUNK_BYTES) if len(data) else ():
                handles.append(start(part, other % size, self._group))
        for handle in handles:
            handle.wait()

    # Reading --------------------------------------------------------------------------------

    def newest(self) -> Key | None:
        """Return the newest iteration whose boxes are all in the memory of some rank."""
        mine = run_collectively(
            self._peers,
            "listing copies of the state",
            lambda: {c.key: (set(c.held), c.tensors) for c in self._copies.copies if c.key[0] >= 0},
        )
        gathered = self._peers.gather(mine)
        best = run_collectively(
            self._peers,
            "choosing a copy of the state",
            lambda: None if gathered is None else _choose(gathered),
        )
        found: Key | None = self._peers.broadcast(best)
        return found

    def contents(self, key: Key) -> MemoryContents:
        """Open the copy that `newest` found. After its all-gather one rank may fail alone, so
        callers agree on errors."""
        copy = next((copy for copy in self._copies.copies if copy.key == key), None)
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
            name: replace(
                tensor,
                shards=tuple(
                    replace(s, file=",".join(map(str, holders[name, s.box]))) for s in tensor.shards
                ),
            )
            for name, tensor in tensors.items()
        }
        manifest = Manifest("", "", {}, located, info)
        place = Path(f"the memory of the ranks (iteration {key[0]})")
        held_here = {} if copy is None else copy.held
        return MemoryContents(place, manifest, common, merged, held_here, self._group)


def _choose(
    gathered: Sequence[Mapping[Key, tuple[set[NamedBox], dict[str, StoredTensor]]]],
) -> Key | None:
    """Return the newest key whose boxes are all held."""
    for key in sorted({key for found in gathered for key in found}, reverse=True):
        holders = [found[key] for found in gathered if key in found]
        held = set().union(*(boxes for boxes, _ in holders))
        needed = {(name, s.box) for name, t in holders[0][1].items() for s in t.shards}
        if needed <= held:
            return key
    return None


def _in_order(shards: Sequence[ShardedTensor]) -> tuple[list[NamedBox], list[Tensor]]:
    """Return names and tensors of all boxes, in the order of a snapshot."""
    pieces = [((s.key, box), view) for s in shards for box, view in s.pieces() if view is not None]
    order = _order([ShardMetadata.of(s) for s in shards])
    return [pieces[i][0] for i in order], [pieces[i][1] for i in order]


def _order(declared: Sequence[ShardMetadata]) -> list[int]:
    """Return the order of the declarations' boxes in a snapshot."""
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
    """Opened copies of all ranks. The file of a shard is the list of ranks that hold it."""

    held: Mapping[NamedBox, Tensor]
    group: Group

    def open_reader(self) -> MemoryReader:
        """Return a reader of boxes, a context manager. Its `finish` is a collective."""
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
        self._has_begun = False

    def __enter__(self) -> MemoryReader:
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if isinstance(error, Exception) and not self._has_begun:
            # The others agree on errors in `finish`.
            raise_on_all_ranks(as_checkpoint_error(error, "reading copies"), self.contents.group)

    @torch.no_grad()
    def start(self, tensor: StoredTensor, read: ReadItem, into: Tensor) -> None:
        """Read a box that this rank holds; note any other box as a request for `finish`."""
        name = (self._keys[id(tensor)], read.shard.box)
        if name in self.contents.held:
            into.copy_(narrow_to(self.contents.held[name], read.in_shard))
            self.bytes_read += into.numel() * element_bytes(tensor.dtype)
            return
        holders = [int(rank) for rank in read.shard.file.split(",")]
        holder = holders[self.contents.group.rank() % len(holders)]
        self._wanted.append((holder, _Request(name, read.in_shard, tensor.dtype), into))

    @torch.no_grad()
    def finish(self) -> None:
        """Exchange the boxes that ranks have requested.

        Raises:
            CheckpointError: on all ranks, if one of them fails before the exchange.
        Communication:
            an all-gather of the requests, two agreements on errors, and one message from each
            holder to each rank that requests boxes of it.
        """
        group, held = self.contents.group, self.contents.held
        peers = control_group(group)
        self._wanted.sort(key=lambda wanted: wanted[0])
        mine = [(holder, request) for holder, request, _ in self._wanted]
        self._has_begun = True  # after the last line that may fail on this rank alone
        raise_on_all_ranks(None, peers)
        asked: list[list[tuple[int, _Request]]] = all_gather_object(mine, group)
        arrived: dict[int, Tensor] = {}
        parts: dict[int, Tensor] = {}

        def prepare() -> None:
            for holder, requests in groupby(mine, key=lambda request: request[0]):
                total = sum(request.num_bytes for _, request in requests)
                arrived[holder] = torch.empty(total, dtype=torch.uint8)
            for rank, requests_of_rank in enumerate(asked):
                boxes = [
                    narrow_to(held[request.name], request.part).contiguous().view(-1)
                    for holder, request in requests_of_rank
                    if holder == group.rank()
                ]
                if boxes:
                    parts[rank] = torch.cat([box.view(torch.uint8) for box in boxes])

        run_collectively(peers, "reading copies", prepare)
        handles = [torch_collectives.irecv(into, holder, group) for holder, into in arrived.items()]
        handles += [torch_collectives.isend(part, rank, group) for rank, part in parts.items()]
        for handle in handles:
            handle.wait()
        begins = dict.fromkeys(arrived, 0)
        for holder, request, into in self._wanted:
            begin = begins[holder]
            begins[holder] += request.num_bytes
            data = arrived[holder][begin : begins[holder]].clone()  # aligned for its type
            into.copy_(data.view(DTYPES[request.dtype]).view(request.part[1]))
            self.bytes_read += request.num_bytes
