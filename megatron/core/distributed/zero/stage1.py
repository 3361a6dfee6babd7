"""Plain data parallelism, and ZeRO stage 1: full gradients of all parameters on every rank.

Micro batches accumulate locally; one reduction follows the last one. With a shard axis (stage 1) a
rank updates its shard of each bucket, and the parameters are gathered afterwards.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from megatron.core.distributed.flat_params import Bucket, FlatParams
from megatron.core.distributed.parameter_shard import ShardSpan
from megatron.core.distributed.zero.gathered_params import gathered_params
from megatron.core.distributed.zero.stage import ReductionPolicy, ZeroStage
from megatron.core.foundation.errors import ScheduleError
from megatron.core.parameters.param_meta import accumulate_main_grad
from megatron.core.transport.work import Work


class ParamAndGradBuffer(ZeroStage):
    """Gradients of all parameters in one flat tensor.

    `parameter.main_grad` is a view into the buffer, written under the main-gradient protocol of
    `megatron.core.parameters.param_meta`: the first writer of a step overwrites.
    """

    def __init__(
        self, flat: FlatParams, policy: ReductionPolicy, *, grad_dtype: torch.dtype
    ) -> None:
        super().__init__(flat, policy)
        self.params = gathered_params(flat)
        self.gradients = torch.zeros(flat.plan.numel, dtype=grad_dtype, device=flat.device)
        parameter: Any  # Parameter's type has no main gradient
        for slot in flat.plan.slots:
            parameter = flat.parameters[slot.index]
            parameter.main_grad = self.gradients[slot.begin : slot.end].view(parameter.shape)
            parameter.main_grad_is_fresh = True

    def begin_step(self) -> None:
        """Make the first writer of each gradient overwrite it."""
        super().begin_step()
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
            self._mark_grad_ready(bucket)

    def finish_reductions(self) -> None:
        """Reduce the remaining buckets, and wait."""
        self.params.prepare_update()
        self.launch_remaining()
        self._wait_for_reductions()

    def _start_reduction(self, bucket: Bucket) -> Work[Tensor]:
        for index in bucket.param_indices:
            parameter: Any = self.flat.parameters[index]
            if parameter.main_grad_is_fresh:
                parameter.main_grad.zero_()
                parameter.main_grad_is_fresh = False
        return self._reduce(bucket, self.gradients[bucket.begin : bucket.end])

    def owned_gradients(self) -> list[Tensor]:
        """Return everything, or the shard of each bucket."""
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
