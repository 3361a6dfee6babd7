"""Gradients that are reduced to the own shard of each bucket, micro batch by micro batch.

A bucket exists from its first gradient until it is reduced; then the own shard is added to an
accumulator and the bucket's memory is used for the next one. A few buckets are alive at a time.
Accumulators in host memory: a reduced shard is copied there while backward goes on (J. Ren et al.,
"ZeRO-Offload", section 4.1, arXiv 2101.06840).
"""

from __future__ import annotations

import torch
from torch import Tensor

from megatron.core.distributed.flat_params import Bucket, FlatParams
from megatron.core.distributed.grad_reducer import GradReducer
from megatron.core.foundation.device import is_host_memory
from megatron.core.offload.device_copies import device_copies
from megatron.core.transport.comm_buffer import BucketPool
from megatron.core.transport.work import Steps, Work


class ShardedGradients:
    """The buckets being filled, and the sums of this rank's shards."""

    def __init__(
        self, flat: FlatParams, dtype: torch.dtype, max_in_flight: int, *, is_on_host: bool = False
    ) -> None:
        """
        Args:
            is_on_host: the sums are in host memory, whatever the device is.
        """
        self._flat = flat
        self.ranges = flat.shard_ranges()
        """Own shard [begin, end) of each bucket."""
        lengths = [end - begin for begin, end in self.ranges]
        self._copies = device_copies(flat.device, to_host=True) if is_on_host else None
        self._is_pinned = is_on_host and not is_host_memory(flat.device)
        self.sums: list[Tensor]
        """Own shard of each bucket, summed over ranks and micro batches."""
        if is_on_host:
            # In one piece: pinned memory comes in powers of two.
            joined = torch.zeros(sum(lengths), dtype=dtype, pin_memory=self._is_pinned)
            self.sums = list(joined.split(lengths))
        else:
            self.sums = [torch.zeros(n, dtype=dtype, device=flat.device) for n in lengths]
        self.has_sum = [False] * len(flat.buckets)
        self.pieces = [flat.plan.pieces(b.begin, b.end) for b in flat.buckets]
        self.full: dict[int, Tensor] = {}
        """Buckets that are being filled."""
        self.filled: list[set[int]] = [set() for _ in flat.buckets]
        """Parameters that each of them has."""
        self.arrived: set[int] = set()
        """Parameters that this backward pass is done with."""
        lengths = [end - begin for begin, end in flat.plan.buckets]
        self.pool = BucketPool(lengths, dtype, flat.device, max_in_flight + 1)

    def begin_step(self) -> None:
        """Forget all gradients; no memory is written."""
        self.arrived.clear()
        for full in self.full.values():
            self.pool.free(full)
        self.full.clear()
        self.filled = [set() for _ in self._flat.buckets]
        self.has_sum = [False] * len(self._flat.buckets)

    def take(self, index: int, bucket: Bucket) -> None:
        """Move what of a parameter's `.grad` is in a bucket."""
        gradient = self._flat.parameters[index].grad
        if gradient is None:
            return
        full, flat = self.memory_of(bucket), gradient.reshape(-1)
        for piece in self.pieces[bucket.number]:
            if piece.index == index:
                begin = piece.offset - bucket.begin
                buffer = full[begin : begin + piece.end - piece.begin]
                buffer.copy_(flat[piece.begin : piece.end])
        self.filled[bucket.number].add(index)

    def memory_of(self, bucket: Bucket) -> Tensor:
        """Return memory [n] for a bucket's gradients, with any values in it at first."""
        if bucket.number not in self.full:
            self.full[bucket.number] = self.pool.allocate(bucket.end - bucket.begin)
        return self.full[bucket.number]

    def reduce(self, bucket: Bucket, reducer: GradReducer) -> Work[None]:
        """Start to reduce what has been filled, and to add it to the sums."""
        full = self.memory_of(bucket)
        del self.full[bucket.number]
        filled, self.filled[bucket.number] = self.filled[bucket.number], set()
        end = 0
        for piece in self.pieces[bucket.number]:
            begin = piece.offset - bucket.begin
            # Memory of another bucket: clear what no gradient of this one has overwritten.
            full[end:begin].zero_()
            end = begin + piece.end - piece.begin
            if piece.index not in filled:
                full[begin:end].zero_()
        full[end:].zero_()
        reducer.note_nonfinite(bucket, full)
        return Work(self._reduce_and_add(bucket, full, reducer))

    def end_backward(self, reducer: GradReducer) -> None:
        """Reduce what the backward pass has left; the next gradients belong to another one."""
        reducer.launch_remaining()
        reducer.begin_backward()
        self.arrived.clear()

    def finish_reductions(self, reducer: GradReducer) -> None:
        """Reduce what is left, and wait.

        A rank without any gradient takes part as well: its replicas may have some.
        """
        if self.arrived or not all(self.has_sum):
            self.end_backward(reducer)
        reducer.wait()

    def _reduce_and_add(self, bucket: Bucket, full: Tensor, reducer: GradReducer) -> Steps[None]:
        is_first = not self.has_sum[bucket.number]
        self.has_sum[bucket.number] = True
        total = self.sums[bucket.number]
        # Whoever shards state wants little in memory; the others want speed.
        slot = self.pool.slot(bucket.number, keeps_pages=self._flat.mesh.shard_size == 1)
        into = total if is_first and self._copies is None else None
        own = yield from reducer.steps(bucket, full, slot, into)
        if self._copies is not None:
            target = total if is_first else torch.empty_like(total, pin_memory=self._is_pinned)
            copy = self._copies.start(own, target)
            if not copy.is_completed():
                yield [copy]
            copy.wait()
            if not is_first:
                total.add_(target)
        elif not is_first:
            total.add_(own)
        elif own is not total:
            total.copy_(own)
        self.pool.free(full)
