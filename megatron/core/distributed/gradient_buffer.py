"""Main gradients of many parameters in one flat tensor."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor, nn

from megatron.core.distributed.bucketed_buffer import Bucket, BucketedBuffer
from megatron.core.distributed.parameter_shard import ShardSpan
from megatron.core.errors import ScheduleError
from megatron.core.param_meta import accumulate_main_grad
from megatron.core.transport.work import Work


class GradientBuffer(BucketedBuffer):
    """Unsharded gradients of all parameters: plain data parallelism and ZeRO stage 1.

    `parameter.main_grad` is a view into the buffer, written under the main-gradient protocol of
    `megatron.core.param_meta`: the first writer of a step overwrites. Micro batches accumulate
    locally; one reduction follows the last one.
    """

    def __init__(self, parameters: Sequence[tuple[str, nn.Parameter]], **options: Any) -> None:
        """Take the arguments of `BucketedBuffer`."""
        super().__init__(parameters, **options)
        self.gradients, self._gradient_memory = self._readable_zeros(
            self.plan.numel, self.grad_dtype
        )
        parameter: Any  # of which Parameter's type does not know the main gradient
        for slot in self.plan.slots:
            parameter = self.parameters[slot.index]
            parameter.main_grad = self.gradients[slot.begin : slot.end].view(parameter.shape)
            parameter.main_grad_is_fresh = True

    def begin_step(self) -> None:
        """Declare the gradients of the last step void; no memory is written."""
        self._finish_transfers()
        parameter: Any
        for parameter in self.parameters:
            parameter.main_grad_is_fresh = True
        self._reset_buckets()
        self.nonfinite = None

    def gradient_arrived(self, index: int, is_final: bool) -> None:
        """Add `.grad`, unless a fused backward wrote `main_grad` itself."""
        parameter = self.parameters[index]
        if parameter.grad is not None:
            if not getattr(parameter, "grad_added_to_main_grad", False):
                accumulate_main_grad(parameter, parameter.grad)
            parameter.grad = None
        if not is_final or self.mesh.size == 1:
            return
        if any(b.is_launched or b.num_missing == 0 for b in self._buckets_of[index]):
            raise ScheduleError(
                f"a second gradient of {self.names[index]} after its reduction had begun.",
                rule="only the backward pass of the last micro batch may start the reduction",
                fix="run the earlier micro batches inside no_sync(), and begin each step with"
                " zero_grad_buffer()",
            )
        for bucket in self._buckets_of[index]:
            self._mark_arrived(bucket)

    def end_backward(self) -> None:
        """Nothing: the schedule says which micro batch is the last one."""

    def finish_reductions(self) -> None:
        """Start what has not been started, and wait for all.

        Afterwards the own shards of parameters may change, too.
        """
        self.wait_for_readers()
        self.launch_remaining()
        self._finish_transfers()

    def _most_in_flight(self) -> int:
        # Where nothing is received no bucket needs memory of its own.
        is_read = self._gradient_memory is not None and self._gradient_memory.is_shared
        return len(self.buckets) if is_read else self.max_in_flight

    def _reduction_of(self, bucket: Bucket) -> Work:
        for index in bucket.members:
            parameter: Any = self.parameters[index]
            if parameter.main_grad_is_fresh:
                parameter.main_grad.zero_()
                parameter.main_grad_is_fresh = False
        gradients = self.gradients[bucket.begin : bucket.end]
        self._note_nonfinite(bucket, gradients)
        return Work(self._reduction_steps(bucket, gradients))

    def owned_gradients(self) -> list[Tensor]:
        """Return the flat tensors of reduced gradients of which this rank is an owner."""
        if self.mesh.shard_size == 1:
            return [self.gradients]
        return [self.mesh.own(self.gradients[b.begin : b.end]) for b in self.buckets]

    def spans(self) -> list[ShardSpan]:
        """Return what this rank updates: everything, or its shard of each bucket."""
        if self.mesh.shard_size == 1:
            return [self._span(0, self.plan.numel, self.gradients)]
        rank, size = self.mesh.shard_rank, self.mesh.shard_size
        ranges = [self.plan.shard(bucket.number, rank, size) for bucket in self.buckets]
        return [self._span(begin, end, self.gradients[begin:end]) for begin, end in ranges]
