"""ZeRO stage 2: each rank keeps its shard of the gradients only.

S. Rajbhandari et al., "ZeRO: Memory Optimizations Toward Training Trillion Parameter Models",
section 5.2, arXiv 1910.02054.

Every backward pass is followed by a reduction, in `no_sync()` too: not to reduce would mean to
keep full gradients. So the traffic grows with the number of micro batches, and a pipeline needs
no rule of its own. Sums over ranks are added up per micro batch, so the result differs from the
lower stages by fp32 rounding. Where weight gradients are deferred (`step_context.deferred_wgrad`) a
micro batch is reduced when they are computed; what the first half of its backward has finished
(norms, biases, embeddings) stays in `.grad` until then.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

import torch
from torch import Tensor, nn

from megatron.core.distributed.flat_params import Bucket, FlatParams, LayoutOptions
from megatron.core.distributed.grad_reducer import MAX_IN_FLIGHT, GradReducer, ReductionPolicy
from megatron.core.distributed.parameter_shard import ShardSpan
from megatron.core.distributed.zero.quantized_params import gathered_params
from megatron.core.distributed.zero.sharded_gradients import ShardedGradients
from megatron.core.transport.work import Work

COPIES_IN_FLIGHT = 4
"""Buckets on their way to the host beside those in reduction: a layer's gradients come together."""


class Zero2Buffer:
    """This rank's shard of each bucket of gradients; see `ZeroStage`.

    Parameters get no `main_grad`: backward leaves their gradients in `.grad`, from where they go
    into the bucket at once. The mesh has a shard axis, unless sums are in host memory.
    """

    flat: FlatParams
    reducer: GradReducer

    def __init__(
        self,
        parameters: Sequence[tuple[str, nn.Parameter]],
        options: LayoutOptions,
        *,
        grad_dtype: torch.dtype,
        policy: ReductionPolicy,
        is_updated_on_host: bool = False,
    ) -> None:
        """
        Args:
            is_updated_on_host: gradients are copied to the host beside backward, and updated
                weights to the device beside the update.
        """
        self.flat = FlatParams(parameters, options)
        self._values = gathered_params(self.flat, is_updated_on_host=is_updated_on_host)
        most = MAX_IN_FLIGHT + (COPIES_IN_FLIGHT if is_updated_on_host else 0)
        self.grads = ShardedGradients(self.flat, grad_dtype, most, is_on_host=is_updated_on_host)
        self.reducer = GradReducer(self.flat, policy, self._reduce, max_in_flight=lambda: most)

    def begin_step(self) -> None:
        """See `ZeroStage`."""
        self.reducer.begin_step()
        self.grads.begin_step()

    def register_grad_ready(self, index: int, is_final: bool) -> None:
        """Move `.grad` into the buckets that the parameter is in, and reduce full ones."""
        if index in self.grads.arrived:
            # Another backward pass has begun without an end of the last one being seen.
            self.end_backward()
        self.grads.arrived.add(index)
        # A large parameter never needs the memory of all its buckets at a time.
        for bucket in self.flat.buckets_of[index]:
            self.grads.take(index, bucket)
            self.reducer.mark_grad_ready(bucket)
        self.flat.parameters[index].grad = None

    def register_grad_deferred(self, index: int) -> None:
        """Nothing: parameters stay when a gradient is computed later."""

    def end_backward(self) -> None:
        """See `ZeroStage`."""
        self.grads.end_backward(self.reducer)

    def finish_reductions(self) -> None:
        """See `ZeroStage`."""
        self.grads.finish_reductions(self.reducer)
        self.wait_for_readers()

    def _reduce(self, bucket: Bucket) -> Work[None]:
        return self.grads.reduce(bucket, self.reducer)

    def owned_gradients(self) -> list[Tensor]:
        """See `ZeroStage`."""
        return self.grads.sums

    def spans(self) -> list[ShardSpan]:
        """Return this rank's shard of each bucket."""
        parts = zip(self.grads.ranges, self.grads.sums, self._values.arrivals, strict=True)
        return [
            self.flat.span(begin, end, total, arrivals=arrivals)
            for (begin, end), total, arrivals in parts
        ]

    def start_gathers(self) -> None:
        """See `ZeroStage`."""
        self._values.start()

    def finish_gathers(self, indices: Collection[int] | None = None) -> None:
        """See `ZeroStage`."""
        self._values.finish(indices)

    def wait_for_readers(self) -> None:
        """See `ZeroStage`."""
        self._values.wait_for_readers()
