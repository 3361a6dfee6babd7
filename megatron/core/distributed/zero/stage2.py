"""ZeRO stage 2: each rank keeps its shard of the gradients only.

S. Rajbhandari et al., "ZeRO: Memory Optimizations Toward Training Trillion Parameter Models",
section 5.2, arXiv 1910.02054.

A bucket has memory from its first gradient until it is reduced. Then the own shard is added to an
accumulator. A few buckets have memory at a time. Accumulators may be in host memory: a reduced
shard is copied there while backward continues (J. Ren et al., "ZeRO-Offload", section 4.1, arXiv
2101.06840).

Every backward pass is followed by a reduction, in `no_sync()` too: without a reduction a rank would
have to keep full gradients. So the traffic grows with the number of micro batches, and a pipeline
needs no rule of its own. Sums over ranks are added per micro batch, so the result differs from the
lower stages by fp32 rounding. If weight gradients are deferred (`step_context.deferred_wgrad`), a
micro batch is reduced when they are computed; until then the gradients of the first half of its
backward pass (norms, biases, embeddings) stay in `.grad`.
"""

from __future__ import annotations

import torch
from torch import Tensor

from megatron.core.distributed.flat_params import Bucket, FlatParams
from megatron.core.distributed.parameter_shard import ShardSpan
from megatron.core.distributed.zero.gathered_params import GatheredParams
from megatron.core.distributed.zero.sharded_params import ShardedParams
from megatron.core.distributed.zero.stage import ReductionPolicy, ZeroStage
from megatron.core.foundation.device import is_host_memory
from megatron.core.offload.device_copies import device_copies
from megatron.core.parameters.exact_sum import on_grid
from megatron.core.transport.work import AnyWork, Work


class Zero2Buffer(ZeroStage):
    """This rank's shard of each bucket of gradients.

    Parameters get no `main_grad`: backward leaves their gradients in `.grad`, and they are moved
    into the bucket at once. The mesh has a shard axis, unless sums are in host memory.
    """

    copies_in_flight = 4
    """More buckets that are copied to the host: the gradients of a layer arrive together."""
    defers_gradients = True

    def __init__(
        self,
        flat: FlatParams,
        params: GatheredParams | ShardedParams,
        policy: ReductionPolicy,
        *,
        grad_dtype: torch.dtype,
        sums_on_host: bool = False,
    ) -> None:
        """
        Args:
            sums_on_host: the sums are in host memory, whatever the device is.
        """
        super().__init__(flat, policy)
        self.params = params
        self._ranges = flat.shard_ranges()
        """Own shard [begin, end) of each bucket."""
        lengths = [end - begin for begin, end in self._ranges]
        self._copies = None
        self._is_pinned = sums_on_host and not is_host_memory(flat.device)
        self.sums: list[Tensor]
        """Own shard of each bucket, summed over ranks and micro batches."""
        if sums_on_host:
            self.max_in_flight += self.copies_in_flight
            self._copies = device_copies(flat.device, to_host=True)
            # In one piece: pinned memory is allocated in powers of two.
            joined = torch.zeros(sum(lengths), dtype=grad_dtype, pin_memory=self._is_pinned)
            self.sums = list(joined.split(lengths))
        else:
            self.sums = [torch.zeros(n, dtype=grad_dtype, device=flat.device) for n in lengths]
        self._grad_dtype = grad_dtype
        self._has_sum = [False] * len(flat.buckets)
        self._pieces = [flat.plan.pieces(b.begin, b.end) for b in flat.buckets]
        self.full: dict[int, Tensor] = {}
        """Buckets that are being filled."""
        self._filled: list[set[int]] = [set() for _ in flat.buckets]
        """Parameters whose gradient each of them contains."""
        self._rounded: dict[int, Tensor] = {}
        """Gradients of parameters that are registered later, as exact sums."""
        self._is_exact = grad_dtype == torch.float64 and flat.dtype != torch.float64
        self._arrived: set[int] = set()
        """Parameters whose gradient this backward pass has computed."""

    def begin_step(self) -> None:
        """Discard all gradients; no memory is written."""
        super().begin_step()
        self._arrived.clear()
        self._rounded.clear()
        self.full.clear()
        self._filled = [set() for _ in self.flat.buckets]
        self._has_sum = [False] * len(self.flat.buckets)

    def register_grad_deferred(self, index: int) -> None:
        """Round a term of an exact sum, before other micro batches add to `.grad`."""
        parameter = self.flat.parameters[index]
        if self._is_exact and parameter.grad is not None:
            rounded, parameter.grad = on_grid(parameter.grad), None
            self._rounded[index] = self._rounded.get(index, 0) + rounded

    def register_grad_ready(self, index: int, is_final: bool) -> None:
        """Move `.grad` into the buckets that the parameter is in, and reduce full ones."""
        self._note_arrival(index)
        # A large parameter never needs the memory of all its buckets at a time.
        for bucket in self.flat.buckets_of[index]:
            self._take(index, bucket)
            self._mark_grad_ready(bucket)
        self.flat.parameters[index].grad = None
        self._rounded.pop(index, None)

    def _note_arrival(self, index: int) -> None:
        if index in self._arrived:
            self.end_backward()  # another backward pass has begun without a report of the end
        self._arrived.add(index)

    def _take(self, index: int, bucket: Bucket) -> None:
        """Move the part of a parameter's `.grad`, and of earlier terms, that is in a bucket."""
        gradient, rounded = self.flat.parameters[index].grad, self._rounded.get(index)
        if gradient is not None and self._is_exact:
            gradient = on_grid(gradient) if rounded is None else on_grid(gradient).add_(rounded)
        elif gradient is None:
            gradient = rounded
        if gradient is None:
            return
        full, flat = self._memory_of(bucket), gradient.reshape(-1)
        for piece in self._pieces[bucket.number]:
            if piece.index == index:
                begin = piece.offset - bucket.begin
                buffer = full[begin : begin + piece.end - piece.begin]
                buffer.copy_(flat[piece.begin : piece.end])
        self._filled[bucket.number].add(index)

    def _memory_of(self, bucket: Bucket) -> Tensor:
        """Return memory [n] for a bucket's gradients; its first values are undefined."""
        if bucket.number not in self.full:
            length, device = bucket.end - bucket.begin, self.flat.device
            self.full[bucket.number] = torch.empty(length, dtype=self._grad_dtype, device=device)
        return self.full[bucket.number]

    def end_backward(self) -> None:
        """Reduce the remaining buckets; the next gradients belong to another backward pass."""
        self.launch_remaining()
        self._expect_gradients()
        self._arrived.clear()

    def finish_reductions(self) -> None:
        """Reduce the remaining buckets, and wait.

        A rank without any gradient takes part as well: its replicas may have some.
        """
        if self._arrived or not all(self._has_sum):
            self.end_backward()
        self._wait_for_reductions()
        self.params.prepare_update()

    def _start_reduction(self, bucket: Bucket) -> AnyWork:
        """Start to reduce the gradients of a bucket, and to add them to the sums."""
        full = self._memory_of(bucket)
        del self.full[bucket.number]
        filled, self._filled[bucket.number] = self._filled[bucket.number], set()
        end = 0
        for piece in self._pieces[bucket.number]:
            begin = piece.offset - bucket.begin
            if begin > end:  # most pieces have no padding before them
                full[end:begin].zero_()
            end = begin + piece.end - piece.begin
            if piece.index not in filled:
                full[begin:end].zero_()
        full[end:].zero_()

        total, copies = self.sums[bucket.number], self._copies
        is_first = not self._has_sum[bucket.number]
        self._has_sum[bucket.number] = True
        if copies is None:
            reduction = self._reduce(bucket, full, total if is_first else None)
            return reduction.then(lambda own: _add(own, total, is_first))

        def copy_and_add(own: Tensor) -> Work[Tensor]:
            target = total if is_first else torch.empty_like(total, pin_memory=self._is_pinned)
            copied = Work.of([copies.start(own, target)], target)
            return copied.then(lambda copy: _add(copy, total, is_first))

        return self._reduce(bucket, full).then(copy_and_add)

    def owned_gradients(self) -> list[Tensor]:
        """Return this rank's shard of each bucket."""
        return self.sums

    def spans(self) -> list[ShardSpan]:
        """Return this rank's shard of each bucket."""
        parts = zip(self._ranges, self.sums, self.params.fetches, strict=True)
        return [
            self.flat.span(begin, end, total, self.params.values_of, fetches)
            for (begin, end), total, fetches in parts
        ]


def _add(own: Tensor, total: Tensor, is_first: bool) -> Tensor:
    """Add the reduced gradients of a micro batch [n] to the sums [n], or begin with them."""
    if not is_first:
        total.add_(own)
    elif own is not total:
        total.copy_(own)
    return total
