"""Shards of parameters, and the units that are gathered from them: ZeRO stage 3.

A unit (`FlatParam`, the parameters of a transformer layer) is gathered before it computes and freed
afterwards; `parameter_units` decides when.

A unit's values are gathered into one flat tensor whose *memory* is freed and allocated again
(`transport.unit_memory`). Views of a weight that autograd has saved (its transpose, for example)
become valid again before backward reads them, and never keep the memory alive. While a unit is
sharded its parameters show a NaN without memory of its own (`initialization.without_memory`): a
read by mistake does not crash.
"""

from __future__ import annotations

from collections.abc import Iterable
from functools import partial
from itertools import accumulate

import torch
from torch import Tensor, nn

from megatron.core.distributed.communication import gather_parameters
from megatron.core.distributed.flat_params import Bucket, FlatParams
from megatron.core.distributed.sharding_arithmetic import Piece
from megatron.core.distributed.zero.flat_param import FlatParam, Pass
from megatron.core.distributed.zero.shard_storage import shard_storage
from megatron.core.parameters.initialization import fill_deferred_weights, without_memory
from megatron.core.transport.transport import has_tags
from megatron.core.transport.unit_memory import UnitMemory
from megatron.core.transport.work import Steps, Work

_GATHER_TAGS = 1 << 15
"""Added to a bucket's tag: gathers overlap with reductions."""


class ShardedParams:
    """This rank's shard of each bucket of values, and the units."""

    def __init__(
        self, flat: FlatParams, model: nn.Module, offload_path: str | None, is_on_host: bool
    ) -> None:
        """
        Args:
            model: asked for initial values of parameters that have no memory yet.
            offload_path, is_on_host: see `shard_storage`.
        Raises:
            ConfigError: on all ranks, if one of them cannot have the file.
        """
        self._flat = flat
        self._ranges = flat.shard_ranges()
        lengths = [end - begin for begin, end in self._ranges]
        self._storage = shard_storage(flat, lengths, path=offload_path, is_on_host=is_on_host)
        self.shards = self._storage.shards
        ends = list(accumulate(lengths))
        ranges = list(zip([0, *ends], ends, strict=False))
        in_units = [[ranges[number] for number in numbers] for numbers in flat.plan.sections]
        self._memory = UnitMemory(self._storage.buffer, flat.mesh.shard, flat.device, in_units)
        self.units = [
            FlatParam([flat.buckets[number] for number in numbers], tensor)
            for numbers, tensor in zip(flat.plan.sections, self._memory.tensors, strict=True)
        ]
        self.unit_of = {
            i: number for number, unit in enumerate(self.units) for i in unit.param_indices
        }
        """Number of each parameter's unit."""
        self.absent: list[Tensor] = [without_memory(p.detach()) for p in flat.parameters]
        """What each parameter shows while it is sharded."""
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
        unit.unsharded.allocate()  # no view can be made of an emptied storage
        for piece in flat.plan.pieces(first, last):
            parameter = flat.parameters[piece.index]
            view = unit.unsharded.tensor[piece.offset - first :][: parameter.numel()]
            unit.views.append((parameter, view.view(parameter.shape)))
            parameter.data = self.absent[piece.index]
        unit.unsharded.free()

    def allocate(self, number: int) -> None:
        """Take the memory of a unit before its gather, which then cannot fail for want of it."""
        self.units[number].unsharded.allocate()

    def start_gather(self, number: int, user: Pass) -> None:
        """Start to gather a unit, if it is neither unsharded nor in flight.

        It stays until `user` has released it, whatever the other pass does.

        Communication: all-gather of each bucket of the unit over `mesh.shard`.
        """
        unit = self.units[number]
        unit.users.add(user)
        if unit.is_unsharded or unit.gathers:
            return
        with torch.no_grad():
            unit.unsharded.allocate()
            if (mapped := self._memory.start_mapped_gather()) is not None:
                unit.gathers = [mapped]
            else:
                unit.gathers = [self._gather_bucket(unit, bucket) for bucket in unit.buckets]

    def _gather_bucket(self, unit: FlatParam, bucket: Bucket) -> Work[Tensor]:
        return Work(self._gather_steps(unit, bucket))

    def _gather_steps(self, unit: FlatParam, bucket: Bucket) -> Steps[Tensor]:
        """Gather a bucket, when its shard is near: a copy on its way delays nothing else."""
        storage, mesh = self._storage, self._flat.mesh
        copy, copies = storage.take_copy(bucket.number), storage.copies
        shard = storage.shards[bucket.number] if copy is None else copy.target
        start = partial(
            gather_parameters,
            unit.part_of(bucket),
            mesh,
            tag=self._flat.tag + _GATHER_TAGS + bucket.number,
            shard=shard,
            slot=storage.slot(bucket.number),
        )
        if copy is None or copies is None:
            return (yield from start())
        if mesh.shard_size > 1 and not has_tags(mesh.shard):
            # Without tags collectives must start in one order on all ranks: here.
            with copies.after([copy]):
                gather = start()
            return (yield from gather)
        if not copy.is_completed():
            yield [copy]
        copy.wait()
        return (yield from start())

    def prefetch(self, number: int) -> bool:
        """Bring a unit's shards near, from their file or to the device, if it is still sharded.

        Returns:
            whether more may follow.
        """
        unit = self.units[number]
        if unit.is_unsharded or unit.gathers:
            return True
        return self._storage.prefetch([bucket.number for bucket in unit.buckets])

    def page_out(self, buckets: Iterable[Bucket]) -> None:
        """Leave own shards to their file, if they have one."""
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
        """Free a unit's values, if `user` has asked for them and was the last one to use them.

        Args:
            keep: leave them even so, until another pass has used and released them.
        """
        unit = self.units[number]
        if user in unit.users:
            unit.users.remove(user)
            if not unit.users and keep:
                # Logits come next, which need more than the layer that backward gathers after them.
                self._memory.trim()
            elif not unit.users:
                self._free(unit)

    def _free(self, unit: FlatParam) -> None:
        if unit.gathers:
            self._wait_for(unit)
        elif not unit.is_unsharded:
            unit.unsharded.free()
            return
        unit.is_unsharded = False
        for index in unit.param_indices:
            self._flat.parameters[index].data = self.absent[index]
        unit.unsharded.free()

    def release_all(self) -> None:
        """Free the values of all units, whoever has asked for them: no pass runs."""
        for unit in self.units:
            unit.users.clear()
            self._free(unit)

    def wait_for_readers(self) -> None:
        """Free the values of all units, and wait until no rank reads the shards any more."""
        try:
            self.release_all()
            self._storage.forget_copies()
        finally:  # other ranks wait for this one
            if not self._memory.wait_for_mapped_readers():
                self._storage.wait_for_readers()

    def forget_copies(self) -> None:
        """Drop copies of shards, which may change."""
        self._storage.forget_copies()

    def trim(self) -> None:
        """Return spare pages to the system."""
        self._memory.trim()

    def values_of(self, piece: Piece) -> Tensor:
        """Return a piece of the own shard, in the parameter's shape if that is all of it."""
        buckets = self._flat.buckets_of[piece.index]
        number = next(b.number for b in buckets if b.begin <= piece.offset < b.end)
        begin = piece.offset - self._ranges[number][0]
        values = self.shards[number][begin : begin + piece.end - piece.begin]
        shape = self._flat.parameters[piece.index].shape
        return values.view(shape) if values.numel() == shape.numel() else values
