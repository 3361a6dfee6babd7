"""ZeRO stage 3: each rank keeps its shard of the gradients and of the parameters only.

S. Rajbhandari et al., "ZeRO: Memory Optimizations Toward Training Trillion Parameter Models",
section 5.3, arXiv 1910.02054. `sharded_params` stores the values, unit by unit; this file handles
the gradients. The gradients of a layer are one bucket, and backward computes them inside that
bucket. The gradients of a large table are computed in `.grad` and are sent in several buckets, one
after another.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from megatron.core.distributed.flat_params import Bucket, FlatParams
from megatron.core.distributed.zero.sharded_params import Pass, ShardedParams
from megatron.core.distributed.zero.stage import ReductionPolicy
from megatron.core.distributed.zero.stage2 import Zero2Buffer
from megatron.core.parameters.initialization import without_memory
from megatron.core.parameters.param_meta import accumulate_main_grad
from megatron.core.transport.work import AnyWork


class Zero3Buffer(Zero2Buffer):
    """This rank's shard of each unit's parameters, gradients and sums.

    During backward `main_grad` of a layer's parameters is a view into the bucket being filled, so
    weight gradients are computed directly in the memory that is sent.
    """

    max_in_flight = 1
    copies_in_flight = 1
    shards_parameters = True
    params: ShardedParams

    def __init__(
        self,
        flat: FlatParams,
        params: ShardedParams,
        policy: ReductionPolicy,
        *,
        grad_dtype: torch.dtype,
        sums_on_host: bool = False,
    ) -> None:
        super().__init__(flat, params, policy, grad_dtype=grad_dtype, sums_on_host=sums_on_host)
        self.kept_after_backward: frozenset[int] = frozenset()
        """Units that stay unsharded when a backward pass releases them: a forward pass follows."""
        self._deferred: set[int] = set()
        """Parameters that backward has used, and whose gradients are deferred."""
        self._no_gradient: list[Tensor | None] = [
            None
            if params.units[params.unit_of[index]].has_several_buckets
            else without_memory(absent.to(grad_dtype))
            for index, absent in enumerate(params.absent)
        ]
        """`main_grad` outside of a backward pass; None leaves a gradient in `.grad`."""
        self._hide_gradients()

    def _hide_gradients(self) -> None:
        for parameter, buffer in zip(self.flat.parameters, self._no_gradient, strict=True):
            _show_gradient(parameter, buffer)

    def own_shards(self) -> list[Tensor]:
        """Return the own shard [n] of each bucket's values."""
        self.params.forget_copies()
        return self.params.shards

    def release(self, number: int, user: Pass, *, keep: bool = False) -> None:
        """Free a unit that no pass uses any more; see `ShardedParams.release`."""
        if user is Pass.BACKWARD:
            self._deferred.difference_update(self.params.units[number].param_indices)
            keep = number in self.kept_after_backward
        self.params.release(number, user, keep=keep)

    def begin_step(self) -> None:
        """Discard all gradients, and free all units."""
        super().begin_step()
        self._hide_gradients()
        self.params.release_all()

    def prepare_gradients(self, number: int) -> None:
        """Allocate the bucket of a layer, and point `main_grad` of its parameters into it."""
        unit = self.params.units[number]
        bucket = unit.buckets[0]
        if unit.has_several_buckets or bucket.number in self.full:
            return
        memory = self._memory_of(bucket)
        for piece in self._pieces[bucket.number]:
            parameter = self.flat.parameters[piece.index]
            buffer = memory[piece.offset - bucket.begin :][: parameter.numel()]
            _show_gradient(parameter, buffer.view(parameter.shape))

    def withhold_gradients(self, number: int) -> None:
        """Leave the gradients of a unit's parameters in `.grad`: most of them are computed later,
        and the bucket shall have memory only then."""
        parameter: Any
        for index in self.params.units[number].param_indices:
            parameter = self.flat.parameters[index]
            parameter.main_grad = None

    def register_grad_deferred(self, index: int) -> None:
        """Free the parameters of a unit when a backward pass has used the last of them."""
        super().register_grad_deferred(index)
        self._deferred.add(index)
        number = self.params.unit_of[index]
        if self._deferred.issuperset(self.params.units[number].param_indices):
            self.release(number, Pass.BACKWARD)

    def register_grad_ready(self, index: int, is_final: bool) -> None:
        """Reduce a unit when its last gradient has arrived, and free its parameters."""
        self._note_arrival(index)
        number = self.params.unit_of[index]
        parameter, unit = self.flat.parameters[index], self.params.units[number]
        for bucket in self.flat.buckets_of[index]:
            if parameter.grad is not None and not unit.has_several_buckets:
                self.prepare_gradients(number)
                accumulate_main_grad(parameter, parameter.grad)
                parameter.grad = None
            self._mark_grad_ready(bucket)
        self._drop_reduced(index)
        if not any(bucket.num_pending for bucket in unit.buckets):
            self.release(number, Pass.BACKWARD)

    def _drop_reduced(self, index: int) -> None:
        """Drop a `.grad` that all buckets have taken."""
        if all(bucket.is_launched for bucket in self.flat.buckets_of[index]):
            self.flat.parameters[index].grad = None

    def _start_reduction(self, bucket: Bucket) -> AnyWork:
        unit = self.params.units[self.params.unit_of[bucket.param_indices[0]]]
        if unit.has_several_buckets:
            # Not before: a norm's gradient arrives first, and its bucket would take memory.
            for index in bucket.param_indices:
                self._take(index, bucket)
                self._drop_reduced(index)
        elif bucket.number in self.full:
            for index in bucket.param_indices:
                parameter: Any = self.flat.parameters[index]
                if not parameter.main_grad_is_fresh:
                    self._filled[bucket.number].add(index)
                _show_gradient(parameter, self._no_gradient[index])
        return super()._start_reduction(bucket)


def _show_gradient(parameter: Any, buffer: Tensor | None) -> None:
    """Set `main_grad` to `buffer`, which the first writer overwrites."""
    parameter.main_grad = buffer
    parameter.main_grad_is_fresh = True
