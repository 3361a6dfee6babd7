"""Shards of parameters, and the units that are gathered from them: ZeRO stage 3.

A unit (the parameters of a transformer layer) is gathered before it computes and freed afterwards;
`parameter_units` decides when. `ShardStorage` holds the own shards: in device memory, in a file, or
in host memory.

A unit's values are gathered into one flat tensor whose *memory* is freed and allocated again. Views
of a weight that autograd has saved (its transpose, for example) become valid again before backward
reads them, and never keep the memory alive. While a unit is sharded its parameters show a NaN
without memory of its own (`initialization.without_memory`): a read by mistake does not crash.
"""

from __future__ import annotations

import mmap
import os
from collections.abc import Collection, Iterable, Sequence
from enum import Enum
from functools import partial

import torch
from torch import Tensor, nn

from megatron.core.distributed.communication import gather_parameters
from megatron.core.distributed.flat_params import Bucket, FlatParams
from megatron.core.distributed.sharding_arithmetic import Piece
from megatron.core.distributed.zero.gathered_params import start_after
from megatron.core.foundation.device import is_host_memory
from megatron.core.foundation.errors import ConfigError, MegatronError
from megatron.core.offload.device_copies import Copy, DeviceCopies, device_copies
from megatron.core.offload.state_stores import reserve_file
from megatron.core.parameters.initialization import fill_deferred_weights, without_memory
from megatron.core.transport.work import AnyWork, Work

_GATHER_TAGS = 1 << 15
"""Added to a bucket's tag: gathers overlap with reductions."""
UNITS_AHEAD = 2
"""Own shards of this many of the largest unit may be on the device before their gathers."""


class Pass(Enum):
    """The pass that uses a unit. One of each may run in a model chunk, overlapped."""

    FORWARD = "forward"
    BACKWARD = "backward"
    """Includes the forward passes inside it that recompute activations."""


class FlatParam:
    """Buckets whose parameters are gathered and freed together."""

    def __init__(self, buckets: list[Bucket], values: Tensor) -> None:
        """
        Args:
            values: [n], all values of the buckets.
        """
        self.buckets = buckets
        self.param_indices = sorted({index for bucket in buckets for index in bucket.param_indices})
        """Numbers of the parameters; none is in another unit."""
        self.values = values
        """[n]; has memory from `allocate` to `free` only."""
        self.views: list[tuple[nn.Parameter, Tensor]] = []
        """The parameters and their values in `values`."""
        self.is_unsharded = False
        self.users: set[Pass] = set()
        """Passes that have gathered the unit and have not released it."""
        self.gathers: list[AnyWork] = []
        """Gathers in flight."""

    def allocate(self) -> None:
        """Allocate memory for the values, which are then undefined."""
        if (storage := self.values.untyped_storage()).nbytes() == 0:
            storage.resize_(self.values.nbytes)

    def free(self) -> None:
        """Free the memory of the values."""
        storage = self.values.untyped_storage()
        if storage.resizable():  # not if numpy shares the memory
            storage.resize_(0)

    @property
    def has_several_buckets(self) -> bool:
        """Whether the gradients are sent in several buckets."""
        return len(self.buckets) > 1


class ShardStorage:
    """Own values of all buckets."""

    copies: DeviceCopies | None = None
    """Copies shards to the device; None if gathers read the shards themselves."""

    def __init__(self, values: Tensor, lengths: Sequence[int]) -> None:
        """
        Args:
            values: [n].
            lengths: elements of the own shard of each bucket.
        """
        self.shards: list[Tensor] = list(values.split(list(lengths)))
        """Own values of each bucket; padding is zero."""

    def take_copy(self, number: int) -> Copy | None:
        """Return the copy of a shard that a gather reads; None if it reads the shard itself."""
        return None

    def prefetch(self, numbers: Sequence[int]) -> bool:
        """Start to read or copy shards that are gathered next; return whether more may follow."""
        return False

    def page_out(self, numbers: Iterable[int]) -> None:
        """Unmap shards that are stored in a file."""

    def forget_copies(self) -> None:
        """Drop copies of shards: the shards may change."""


class FileShards(ShardStorage):
    """Shards in a file, which is mapped into memory and read ahead."""

    def __init__(self, file: int, lengths: Sequence[int], dtype: torch.dtype) -> None:
        """
        Args:
            file: descriptor of a file of zeros; this object closes it.
        """
        numel = sum(lengths)
        self._memory = mmap.mmap(file, numel * dtype.itemsize)
        os.close(file)
        values = torch.frombuffer(self._memory, dtype=dtype, count=numel)
        self._address = values.data_ptr()
        super().__init__(values, lengths)

    def prefetch(self, numbers: Sequence[int]) -> bool:
        """Make the system read the shards of one unit ahead."""
        for number in numbers:
            self._advise(number, mmap.MADV_WILLNEED)
        return False

    def page_out(self, numbers: Iterable[int]) -> None:
        """Unmap the pages of shards; the values stay in the file."""
        for number in numbers:
            self._advise(number, mmap.MADV_DONTNEED)

    def _advise(self, number: int, advice: int) -> None:
        shard = self.shards[number]
        begin = shard.data_ptr() - self._address
        first = begin - begin % mmap.PAGESIZE
        self._memory.madvise(advice, first, begin + shard.nbytes - first)


class HostShards(ShardStorage):
    """Shards in host memory, each copied to the device for its gather.

    Copies are made before their gathers, as long as the copies that wait for a gather take at most
    a given number of bytes. The rest of this rank's parameters takes no memory on the device.
    """

    def __init__(
        self,
        values: Tensor,
        lengths: Sequence[int],
        device: torch.device,
        *,
        most_bytes: int,
        copies: DeviceCopies | None = None,
    ) -> None:
        """
        Args:
            values: [n], in host memory; pinned if the device copies asynchronously.
            most_bytes: of copies that wait for their gather; one unit is always allowed.
        """
        super().__init__(values, lengths)
        self.most_bytes = most_bytes
        self.copies: DeviceCopies = copies or device_copies(device)
        self._ahead: dict[int, tuple[Copy, int]] = {}
        """Bucket -> its copy, and the version of the shard that was copied."""

    def take_copy(self, number: int) -> Copy:
        """Return the copy that was started before, or start one."""
        copy, version = self._ahead.pop(number, (None, -1))
        if copy is None or version != self.shards[number]._version:
            return self.copies.start(self.shards[number])
        return copy

    def prefetch(self, numbers: Sequence[int]) -> bool:
        """Start to copy the shards of a unit, if the limit of bytes allows it."""
        missing = [number for number in numbers if number not in self._ahead]
        asked = sum(self.shards[number].nbytes for number in missing)
        ahead = sum(self.shards[number].nbytes for number in self._ahead)
        if missing and ahead and ahead + asked > self.most_bytes:
            return False
        for number in missing:
            shard = self.shards[number]
            self._ahead[number] = (self.copies.start(shard), shard._version)
        return True

    def forget_copies(self) -> None:
        """Wait for copies that no gather has used, and drop them."""
        for copy, _ in self._ahead.values():
            copy.wait()
        self._ahead = {}


def shard_storage(
    flat: FlatParams, lengths: Sequence[int], *, path: str | None, is_on_host: bool
) -> ShardStorage:
    """Return storage for the own shards.

    Args:
        lengths: elements of the own shard of each bucket.
        path: a directory, to store them in a file there.
        is_on_host: store them in host memory, whatever the device is.
    Raises:
        ConfigError: on all ranks, if one of them cannot create the file.
    """
    if path is not None:
        return FileShards(_file_of_zeros(path, sum(lengths), flat), lengths, flat.dtype)
    if is_on_host:
        is_pinned = not is_host_memory(flat.device)
        values = torch.zeros(sum(lengths), dtype=flat.dtype, pin_memory=is_pinned)
        largest = max(sum(lengths[n] for n in numbers) for numbers in flat.plan.sections)
        most_bytes = UNITS_AHEAD * largest * flat.dtype.itemsize
        return HostShards(values, lengths, flat.device, most_bytes=most_bytes)
    values = torch.zeros(sum(lengths), dtype=flat.dtype, device=flat.device)
    return ShardStorage(values, lengths)


def _file_of_zeros(directory: str, numel: int, flat: FlatParams) -> int:
    problem: MegatronError | None = None
    file = -1
    try:
        num_bytes = numel * flat.dtype.itemsize
        file = reserve_file(directory, num_bytes, flag="--param-offload-path")
    except ConfigError as error:
        problem = error
    if (problem := flat.mesh.agreed(problem)) is not None:
        raise problem
    return file


class ShardedParams:
    """This rank's shard of each bucket of values, and the units."""

    def __init__(
        self, flat: FlatParams, model: nn.Module, offload_path: str | None, is_on_host: bool
    ) -> None:
        """
        Args:
            model: initializes parameters that have no memory yet.
            offload_path, is_on_host: see `shard_storage`.
        Raises:
            ConfigError: on all ranks, if one of them cannot have the file.
        """
        self._flat = flat
        self._ranges = flat.shard_ranges()
        lengths = [end - begin for begin, end in self._ranges]
        self._storage = shard_storage(flat, lengths, path=offload_path, is_on_host=is_on_host)
        self.shards = self._storage.shards
        self.fetches = [None] * len(flat.buckets)  # no optimizer updates them in host memory
        self.units: list[FlatParam] = []
        for numbers in flat.plan.sections:
            buckets = [flat.buckets[number] for number in numbers]
            numel = buckets[-1].end - buckets[0].begin
            values = torch.empty(numel, dtype=flat.dtype, device=flat.device)
            self.units.append(FlatParam(buckets, values))
            self.units[-1].free()
        self.unit_of = {
            i: number for number, unit in enumerate(self.units) for i in unit.param_indices
        }
        """Number of each parameter's unit."""
        self.absent: list[Tensor] = [without_memory(p.detach()) for p in flat.parameters]
        """Data of each parameter while it is sharded."""
        for unit in self.units:
            self._shard(unit, model)

    @torch.no_grad()
    def _shard(self, unit: FlatParam, model: nn.Module) -> None:
        """Keep the own shard of a unit's values, and free the rest."""
        flat = self._flat
        fill_deferred_weights(model, [flat.parameters[index] for index in unit.param_indices])
        for bucket in unit.buckets:
            begin, end = self._ranges[bucket.number]
            shard = self.shards[bucket.number]
            for piece in flat.plan.pieces(begin, end):
                values = flat.parameters[piece.index].detach().reshape(-1)
                view = shard[piece.offset - begin :][: piece.end - piece.begin]
                view.copy_(values[piece.begin : piece.end])
        first, last = unit.buckets[0].begin, unit.buckets[-1].end
        unit.allocate()  # an empty storage has no views
        for piece in flat.plan.pieces(first, last):
            parameter = flat.parameters[piece.index]
            view = unit.values[piece.offset - first :][: parameter.numel()]
            unit.views.append((parameter, view.view(parameter.shape)))
            parameter.data = self.absent[piece.index]
        unit.free()

    def start_gather(self, number: int, user: Pass) -> None:
        """Start to gather a unit, if it is neither unsharded nor in flight.

        It stays until `user` has released it, whatever the other pass does.

        Communication: all-gather of each bucket of the unit over `mesh.shard`.
        """
        unit = self.units[number]
        unit.users.add(user)
        if not unit.is_unsharded and not unit.gathers:
            with torch.no_grad():
                unit.allocate()
                unit.gathers = [self._gather_bucket(unit, bucket) for bucket in unit.buckets]

    def _gather_bucket(self, unit: FlatParam, bucket: Bucket) -> Work[Tensor]:
        """Gather a bucket when its shard is on the device."""
        storage, mesh, begin = self._storage, self._flat.mesh, unit.buckets[0].begin
        copy = storage.take_copy(bucket.number)
        start = partial(
            gather_parameters,
            unit.values[bucket.begin - begin : bucket.end - begin],
            mesh,
            tag=self._flat.tag + _GATHER_TAGS + bucket.number,
            shard=storage.shards[bucket.number] if copy is None else copy.target,
        )
        if copy is None or storage.copies is None:
            return start()
        return start_after([copy], storage.copies, mesh.shard, start)

    def prefetch(self, number: int) -> bool:
        """Read a unit's shards from their file, or copy them to the device, if it is sharded.

        Returns:
            whether more units may follow.
        """
        unit = self.units[number]
        if unit.is_unsharded or unit.gathers:
            return True
        return self._storage.prefetch([bucket.number for bucket in unit.buckets])

    def page_out(self, buckets: Iterable[Bucket]) -> None:
        """Unmap own shards that are stored in a file."""
        self._storage.page_out(bucket.number for bucket in buckets)

    def gather(self, number: int, user: Pass) -> None:
        """Unshard a unit's parameters, until `user` has released them."""
        self.start_gather(number, user)
        unit = self.units[number]
        if unit.is_unsharded:
            return
        self._wait_for(unit)
        self.page_out(unit.buckets)
        for parameter, view in unit.views:
            parameter.data = view
        unit.is_unsharded = True

    @staticmethod
    def _wait_for(unit: FlatParam) -> None:
        for work in unit.gathers:
            work.wait()
        unit.gathers = []

    def release(self, number: int, user: Pass, *, keep: bool = False) -> None:
        """Free a unit's values, if `user` has gathered them and is the last pass to release them.

        Args:
            keep: keep the values nevertheless, until another pass has used and released them.
        """
        unit = self.units[number]
        if user in unit.users:
            unit.users.remove(user)
            if not unit.users and not keep:
                self._free(unit)

    def _free(self, unit: FlatParam) -> None:
        if unit.gathers:
            self._wait_for(unit)
        elif not unit.is_unsharded:
            unit.free()
            return
        unit.is_unsharded = False
        for index in unit.param_indices:
            self._flat.parameters[index].data = self.absent[index]
        unit.free()

    def release_all(self) -> None:
        """Free the values of all units, whichever pass has gathered them: no pass runs."""
        for unit in self.units:
            unit.users.clear()
            self._free(unit)

    def start_gathers(self) -> None:
        """Unmap updated shards that are stored in a file; units are gathered when they compute."""
        self.page_out(self._flat.buckets)

    def finish_gathers(self, indices: Collection[int] | None = None) -> None:
        """Return at once: units are gathered when they compute."""

    def prepare_update(self) -> None:
        """Free the values of all units and the copies of shards: the shards may change."""
        self.release_all()
        self.forget_copies()

    def forget_copies(self) -> None:
        """Drop copies of shards, which may change."""
        self._storage.forget_copies()

    def values_of(self, piece: Piece) -> Tensor:
        """Return a piece of the own shard, in the parameter's shape if the piece is all of it."""
        buckets = self._flat.buckets_of[piece.index]
        number = next(b.number for b in buckets if b.begin <= piece.offset < b.end)
        begin = piece.offset - self._ranges[number][0]
        values = self.shards[number][begin : begin + piece.end - piece.begin]
        shape = self._flat.parameters[piece.index].shape
        return values.view(shape) if values.numel() == shape.numel() else values
