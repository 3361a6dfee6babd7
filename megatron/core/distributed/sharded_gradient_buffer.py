"""Gradients of which each rank keeps its shard only: ZeRO stage 2.

S. Rajbhandari et al., "ZeRO: Memory Optimizations Toward Training Trillion Parameter Models",
section 5.2, arXiv 1910.02054. A bucket exists from its first gradient until it is reduced; then
the own shard is added to an accumulator and the bucket's memory is used for the next one. A few
buckets are alive at a time.

Every backward pass is followed by a reduction, in `no_sync()` too: not to reduce would mean to
keep whole gradients. So the traffic grows with the number of micro batches, and a pipeline needs
no rule of its own. Sums over ranks are added up per micro batch, so the result differs from the
lower stages by fp32 rounding. Where weight gradients are deferred (`step_context.deferred_wgrad`) a
micro batch is reduced when they are computed; what the first half of its backward has finished
(norms, biases, embeddings) stays in `.grad` until then.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from megatron.core.distributed.bucketed_buffer import Bucket, BucketedBuffer
from megatron.core.distributed.parameter_shard import ShardSpan
from megatron.core.transport.shm.bucket_allocator import BucketAllocator
from megatron.core.transport.work import Steps, Work


class ShardedGradientBuffer(BucketedBuffer):
    """This rank's shard of each bucket of gradients.

    Parameters get no `main_grad`: backward leaves their gradients in `.grad`, from where they go
    into the bucket at once.
    """

    def __init__(self, parameters: Sequence[tuple[str, nn.Parameter]], **options: Any) -> None:
        """Take the arguments of `BucketedBuffer`; the mesh has a shard axis."""
        super().__init__(parameters, **options)
        rank, size = self.mesh.shard_rank, self.mesh.shard_size
        self._ranges = [self.plan.shard(bucket.number, rank, size) for bucket in self.buckets]
        self._sums = [
            torch.zeros(end - begin, dtype=self.grad_dtype, device=self.device)
            for begin, end in self._ranges
        ]
        """Own shard of each bucket, summed over ranks and micro batches."""
        self._has_sum = [False] * len(self.buckets)
        self._pieces = [self.plan.pieces(b.begin, b.end) for b in self.buckets]
        self._whole: dict[int, Tensor] = {}
        """Buckets that are being filled."""
        self._filled: list[set[int]] = [set() for _ in self.buckets]
        """Parameters that each of them has."""
        self._arrived: set[int] = set()
        """Parameters that this backward pass is done with."""
        self._places: BucketAllocator | None = None
        """Memory of buckets; an accelerator's allocator keeps what it will need again."""
        if self.device.type == "cpu":
            lengths = [end - begin for begin, end in self.plan.buckets]
            self._places = BucketAllocator(lengths, self.grad_dtype, self.max_in_flight + 1)
            self._gradient_memory = self._places.memory

    def begin_step(self) -> None:
        """Declare the gradients of the last step void; no memory is written."""
        self._finish_transfers()
        self._begin_backward()
        for whole in self._whole.values():
            self._give_back(whole)
        self._whole.clear()
        self._filled = [set() for _ in self.buckets]
        self._has_sum = [False] * len(self.buckets)
        self.nonfinite = None

    def gradient_arrived(self, index: int, is_final: bool) -> None:
        """Move `.grad` into the buckets that the parameter lies in, and reduce full ones."""
        if index in self._arrived:
            # Another backward pass has begun without an end of the last one being seen.
            self.end_backward()
        self._arrived.add(index)
        # A large parameter never needs the places of all its buckets at a time.
        for bucket in self._buckets_of[index]:
            self._take_gradient(index, bucket)
            self._mark_arrived(bucket)
        self._forget_gradient(index)

    def gradient_waits(self, index: int) -> None:
        """Learn that a parameter was used for the last time before its gradient arrives."""

    def _take_gradient(self, index: int, bucket: Bucket) -> None:
        """Move what of `.grad` lies in a bucket."""
        gradient = self.parameters[index].grad
        if gradient is None:
            return
        whole, flat = self._memory_of(bucket), gradient.reshape(-1)
        for piece in self._pieces[bucket.number]:
            if piece.index == index:
                begin = piece.offset - bucket.begin
                place = whole[begin : begin + piece.end - piece.begin]
                place.copy_(flat[piece.begin : piece.end])
        self._filled[bucket.number].add(index)

    def _forget_gradient(self, index: int) -> None:
        """Drop a `.grad` that all buckets have taken."""
        self.parameters[index].grad = None

    def end_backward(self) -> None:
        """Reduce what the backward pass has left; the next gradients belong to another one."""
        self.launch_remaining()
        self._begin_backward()

    def finish_reductions(self) -> None:
        """Reduce what is left, and wait; the own shards of parameters may change afterwards."""
        # A rank without any gradient takes part as well: its replicas may have some.
        if self._arrived or not all(self._has_sum):
            self.end_backward()
        self._finish_transfers()
        self.wait_for_readers()

    def _begin_backward(self) -> None:
        self._reset_buckets()
        self._arrived.clear()

    def _memory_of(self, bucket: Bucket) -> Tensor:
        if bucket.number not in self._whole:
            self._whole[bucket.number] = self._new_memory(bucket.end - bucket.begin)
        return self._whole[bucket.number]

    def _new_memory(self, length: int) -> Tensor:
        """Return memory for a bucket's gradients, with any values in it."""
        if self._places is not None:
            return self._places.allocate(length)
        return torch.empty(length, dtype=self.grad_dtype, device=self.device)

    def _reduction_of(self, bucket: Bucket) -> Work:
        whole = self._memory_of(bucket)
        del self._whole[bucket.number]
        filled, self._filled[bucket.number] = self._filled[bucket.number], set()
        end = 0
        for piece in self._pieces[bucket.number]:
            begin = piece.offset - bucket.begin
            # Memory of another bucket: clear what no gradient of this one has overwritten.
            whole[end:begin].zero_()
            end = begin + piece.end - piece.begin
            if piece.index not in filled:
                whole[begin:end].zero_()
        whole[end:].zero_()
        self._note_nonfinite(bucket, whole)
        return Work(self._reduce_and_add(bucket, whole))

    def _reduce_and_add(self, bucket: Bucket, whole: Tensor) -> Steps:
        is_first = not self._has_sum[bucket.number]
        self._has_sum[bucket.number] = True
        total = self._sums[bucket.number]
        own = yield from self._reduction_steps(bucket, whole, total if is_first else None)
        if not is_first:
            total.add_(own)
        elif own is not total:
            total.copy_(own)
        self._give_back(whole)

    def _give_back(self, whole: Tensor) -> None:
        """Keep the memory of a reduced bucket for another one."""
        if self._places is not None:
            self._places.free(whole)

    def owned_gradients(self) -> list[Tensor]:
        """Return the accumulators."""
        return self._sums

    def spans(self) -> list[ShardSpan]:
        """Return this rank's shard of each bucket."""
        return [
            self._span(begin, end, total)
            for (begin, end), total in zip(self._ranges, self._sums, strict=True)
        ]
