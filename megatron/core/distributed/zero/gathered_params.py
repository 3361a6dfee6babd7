"""Parameters in one tensor, whose updated shards are gathered bucket by bucket: ZeRO 1 and 2."""

from __future__ import annotations

from collections.abc import Collection

from torch import Tensor

from megatron.core.distributed.communication import gather_parameters
from megatron.core.distributed.flat_params import FlatParams
from megatron.core.transport.work import Work


class GatheredParams:
    """The values of all parameters of a layout; nothing where every rank updates all of them."""

    def __init__(self, flat: FlatParams) -> None:
        self._flat = flat
        self._gathers: dict[int, Work[Tensor]] = {}
        self._buffer = None
        if flat.mesh.shard_size == 1:
            return
        self._buffer = flat.zeros(flat.plan.numel, flat.dtype)
        for slot in flat.plan.slots:
            parameter = flat.parameters[slot.index]
            buffer = self._buffer.values[slot.begin : slot.end].view(parameter.shape)
            buffer.copy_(parameter.detach())
            parameter.data = buffer

    def start(self) -> None:
        """Start to gather the shards of all ranks, first layers first."""
        if self._buffer is None:
            return
        self.finish()
        for bucket in reversed(self._flat.buckets):
            self._gathers[bucket.number] = gather_parameters(
                self._buffer.values[bucket.begin : bucket.end],
                self._flat.mesh,
                tag=self._flat.tag + bucket.number,
                slot=self._buffer.slot(bucket.number),
            )

    def finish(self, indices: Collection[int] | None = None) -> None:
        """Wait until parameters are unsharded again: those numbered `indices`, or all."""
        if not self._gathers:
            return
        if indices is None:
            numbers = list(self._gathers)
        else:
            numbers = [b.number for index in indices for b in self._flat.buckets_of[index]]
        for number in numbers:
            work = self._gathers.pop(number, None)
            if work is not None:
                work.wait()

    def wait_for_readers(self) -> None:
        """Wait until no rank reads the own shards any more."""
        self.finish()
        if self._buffer is not None:
            self._buffer.wait_for_readers()
