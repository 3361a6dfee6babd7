"""Plain data parallelism, and ZeRO stage 1: full gradients of all parameters on every rank.

Micro batches accumulate locally; one reduction follows the last one. With a shard axis (stage 1) a
rank updates its shard of each bucket, and the parameters are gathered afterwards.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from megatron.core.distributed.flat_params import Bucket, FlatParams, LayoutOptions
from megatron.core.distributed.grad_reducer import MAX_IN_FLIGHT, GradReducer, ReductionPolicy
from megatron.core.distributed.parameter_shard import ShardSpan
from megatron.core.distributed.zero.quantized_params import gathered_params
from megatron.core.foundation.errors import ScheduleError
from megatron.core.parameters.param_meta import accumulate_main_grad
from megatron.core.transport.work import Work


class ParamAndGradBuffer:
    """Gradients of all parameters in one flat tensor; see `ZeroStage`.

    `parameter.main_grad` is a view into the buffer, written under the main-gradient protocol of
    `megatron.core.parameters.param_meta`: the first writer of a step overwrites.
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
    ) -> None:
        self.flat = flat = FlatParams(parameters, options)
        self._values = gathered_params(flat)
        self.reducer = GradReducer(flat, policy, self._reduce, max_in_flight=self._max_in_flight)
        self._buffer = flat.zeros(flat.plan.numel, grad_dtype)
        self.gradients = self._buffer.values
        parameter: Any  # of which Parameter's type does not know the main gradient
        for slot in flat.plan.slots:
            parameter = flat.parameters[slot.index]
            parameter.main_grad = self.gradients[slot.begin : slot.end].view(parameter.shape)
            parameter.main_grad_is_fresh = True

    def begin_step(self) -> None:
        """See `ZeroStage`."""
        self.reducer.begin_step()
        parameter: Any
        for parameter in self.flat.parameters:
            parameter.main_grad_is_fresh = True

    def register_grad_ready(self, index: int, is_final: bool) -> None:
        """Add `.grad`, unless a fused backward wrote `main_grad` itself."""
        parameter = self.flat.parameters[index]
        if parameter.grad is not None:
            if not getattr(parameter, "grad_added_to_main_grad", False):
                accumulate_main_grad(parameter, parameter.grad)
            parameter.grad = None
        if not is_final or self.flat.mesh.size == 1:
            return
        buckets = self.flat.buckets_of[index]
        if any(b.is_launched or b.num_pending == 0 for b in buckets):
            raise ScheduleError(
                f"a second gradient of {self.flat.names[index]} after its reduction had begun.",
                rule="only the backward pass of the last micro batch may start the reduction",
                fix="run the earlier micro batches inside no_sync(), and begin each step with"
                " zero_grad_buffer()",
            )
        for bucket in buckets:
            self.reducer.mark_grad_ready(bucket)

    def end_backward(self) -> None:
        """Nothing: the schedule says which micro batch is the last one."""

    def finish_reductions(self) -> None:
        """See `ZeroStage`."""
        self.wait_for_readers()
        self.reducer.launch_remaining()
        self.reducer.wait()

    def _max_in_flight(self) -> int:
        # Where nothing is received no bucket needs memory of its own.
        return len(self.flat.buckets) if self._buffer.is_read_in_place else MAX_IN_FLIGHT

    def _reduce(self, bucket: Bucket) -> Work[Tensor]:
        for index in bucket.param_indices:
            parameter: Any = self.flat.parameters[index]
            if parameter.main_grad_is_fresh:
                parameter.main_grad.zero_()
                parameter.main_grad_is_fresh = False
        gradients = self.gradients[bucket.begin : bucket.end]
        self.reducer.note_nonfinite(bucket, gradients)
        # Whoever shards state wants little in memory; the others want speed.
        slot = self._buffer.slot(bucket.number, keeps_pages=self.flat.mesh.shard_size == 1)
        return Work(self.reducer.steps(bucket, gradients, slot))

    def owned_gradients(self) -> list[Tensor]:
        """See `ZeroStage`."""
        mesh = self.flat.mesh
        if mesh.shard_size == 1:
            return [self.gradients]
        return [mesh.own(self.gradients[b.begin : b.end]) for b in self.flat.buckets]

    def spans(self) -> list[ShardSpan]:
        """Return everything, or the shard of each bucket."""
        if self.flat.mesh.shard_size == 1:
            return [self.flat.span(0, self.flat.plan.numel, self.gradients)]
        ranges = self.flat.shard_ranges()
        return [self.flat.span(begin, end, self.gradients[begin:end]) for begin, end in ranges]

    def start_gathers(self) -> None:
        """See `ZeroStage`."""
        self._values.start()

    def finish_gathers(self, indices: Collection[int] | None = None) -> None:
        """See `ZeroStage`."""
        self._values.finish(indices)

    def wait_for_readers(self) -> None:
        """See `ZeroStage`."""
        self._values.wait_for_readers()
