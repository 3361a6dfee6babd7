"""Parameters in one tensor, whose updated shards are gathered bucket by bucket: ZeRO 1 and 2."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from contextlib import ExitStack

from megatron.core.distributed.communication import gather_parameters
from megatron.core.distributed.flat_params import Bucket, FlatParams
from megatron.core.offload.arriving_values import ArrivingValues
from megatron.core.offload.device_copies import device_copies
from megatron.core.transport.comm_buffer import CommBuffer
from megatron.core.transport.transport import has_tags
from megatron.core.transport.work import AnyWork, Steps, Work


class GatheredParams:
    """The values of all parameters of a layout; nothing where every rank updates all of them."""

    def __init__(self, flat: FlatParams, *, is_updated_on_host: bool = False) -> None:
        """
        Args:
            is_updated_on_host: own shards arrive from host memory before they are gathered.
        """
        self._flat = flat
        self._gathers: dict[int, AnyWork] = {}
        self._buffer: CommBuffer | None = None
        self.arrivals: Sequence[ArrivingValues | None] = [None] * len(flat.buckets)
        """Of the own shard of each bucket."""
        if is_updated_on_host:
            copies = device_copies(flat.device)
            self.arrivals = [ArrivingValues(copies) for _ in flat.buckets]
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
        self.finish()
        for bucket in reversed(self._flat.buckets):
            if self._buffer is not None or self.arrivals[bucket.number] is not None:
                self._gathers[bucket.number] = Work(self._gather(bucket))

    def _gather(self, bucket: Bucket) -> Steps[None]:
        """Gather a bucket when the own shard has arrived."""
        arrivals, buffer, mesh = self.arrivals[bucket.number], self._buffer, self._flat.mesh
        arriving = [] if arrivals is None else arrivals.take()
        if buffer is None or has_tags(mesh.shard):
            if not all(copy.is_completed() for copy in arriving):
                yield arriving
            for copy in arriving:
                copy.wait()
        if buffer is None:
            return
        with ExitStack() as stack:
            if arriving and not has_tags(mesh.shard):
                # Without tags collectives must start in one order on all ranks: here.
                assert arrivals is not None
                stack.enter_context(arrivals.copies.after(arriving))
            gather = gather_parameters(
                buffer.values[bucket.begin : bucket.end],
                mesh,
                tag=self._flat.tag + bucket.number,
                slot=buffer.slot(bucket.number),
            )
        yield from gather

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
