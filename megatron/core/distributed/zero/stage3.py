"""ZeRO stage 3: each rank keeps its shard of the gradients and of the parameters only.

S. Rajbhandari et al., "ZeRO: Memory Optimizations Toward Training Trillion Parameter Models",
section 5.3, arXiv 1910.02054. `sharded_params` has the values, unit by unit; this file has the
gradients. Those of a layer are one bucket and are computed where they are sent from; those of a
large table are computed in `.grad` and go out in several buckets, one after another through the
same memory.
"""

from __future__ import annotations

import mmap
from collections.abc import Collection, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from megatron.core.distributed.flat_params import Bucket, FlatParams, LayoutOptions
from megatron.core.distributed.grad_reducer import GradReducer, ReductionPolicy
from megatron.core.distributed.parameter_shard import ShardSpan
from megatron.core.distributed.zero.flat_param import Pass
from megatron.core.distributed.zero.sharded_gradients import ShardedGradients
from megatron.core.distributed.zero.sharded_params import ShardedParams
from megatron.core.parameters.initialization import without_memory
from megatron.core.parameters.param_meta import accumulate_main_grad
from megatron.core.transport.work import Work

_MAX_IN_FLIGHT = 1


class Zero3Buffer:
    """This rank's shard of each unit's parameters, gradients and sums; see `ZeroStage`.

    During backward `main_grad` of a layer's parameters is a view into the bucket being filled, so
    that weight gradients are computed where they are sent from.
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
        model: nn.Module,
        offload_path: str | None = None,
        is_on_host: bool = False,
        sums_on_host: bool = False,
    ) -> None:
        """
        Args:
            parameters: in the order of their units.
            model, offload_path, is_on_host: see `ShardedParams`.
            sums_on_host: see `ShardedGradients`.
        """
        dtype, device = parameters[0][1].dtype, parameters[0][1].device
        if device.type == "cpu":  # pages of different ranks shall follow one another
            options = replace(options, alignment=mmap.PAGESIZE // dtype.itemsize)
        self.flat = FlatParams(parameters, options)
        most = _MAX_IN_FLIGHT + sums_on_host  # one more on its way to the host
        self.grads = ShardedGradients(self.flat, grad_dtype, most, is_on_host=sums_on_host)
        self.reducer = GradReducer(self.flat, policy, self._reduce, max_in_flight=lambda: most)
        self.params = ShardedParams(self.flat, model, offload_path, is_on_host)
        self.kept_after_backward: frozenset[int] = frozenset()
        """Units that stay unsharded when a backward pass releases them: a forward pass follows."""
        self._deferred: set[int] = set()
        """Parameters that a backward pass is done with, but for deferred gradients."""
        self._no_gradient: list[Tensor | None] = [
            None
            if self.params.units[self.params.unit_of[index]].is_sharded
            else without_memory(absent.to(grad_dtype))
            for index, absent in enumerate(self.params.absent)
        ]
        """`main_grad` outside of a backward pass; None lets a gradient go to `.grad`."""
        self._hide_gradients()

    def _hide_gradients(self) -> None:
        for parameter, buffer in zip(self.flat.parameters, self._no_gradient, strict=True):
            _show_gradient(parameter, buffer)

    # Parameters -----------------------------------------------------------------------------

    def unit_of(self, index: int) -> int:
        """Return the number of the unit in which a parameter is."""
        return self.params.unit_of[index]

    def start_gather(self, number: int, user: Pass) -> None:
        """Start to gather a unit; see `ShardedParams`."""
        self.params.start_gather(number, user)

    def prefetch(self, number: int) -> bool:
        """Bring the shards of a unit near; see `ShardedParams`."""
        return self.params.prefetch(number)

    def gather(self, number: int, user: Pass) -> None:
        """Unshard a unit; see `ShardedParams`."""
        self.params.gather(number, user)

    def release(self, number: int, user: Pass, *, keep: bool = False) -> None:
        """Free a unit that no pass uses any more; see `ShardedParams`."""
        if user is Pass.BACKWARD:
            self._deferred.difference_update(self.params.units[number].param_indices)
            keep = number in self.kept_after_backward
        self.params.release(number, user, keep=keep)

    def start_gathers(self) -> None:
        """Leave updated shards to their file, if they have one; units are gathered when they
        compute."""
        self.params.page_out(self.flat.buckets)

    def finish_gathers(self, indices: Collection[int] | None = None) -> None:
        """Nothing: units are gathered when they compute."""

    def wait_for_readers(self) -> None:
        """Free the values of all units, and wait until no rank reads the shards any more."""
        self.params.wait_for_readers()

    # Gradients ------------------------------------------------------------------------------

    def begin_step(self) -> None:
        """See `ZeroStage`."""
        self.reducer.begin_step()
        self.grads.begin_step()
        self._hide_gradients()
        self.params.release_all()

    def prepare_gradients(self, number: int) -> None:
        """Give the parameters of a layer memory for their gradients, if they have none."""
        unit = self.params.units[number]
        bucket = unit.buckets[0]
        if unit.is_sharded or bucket.number in self.grads.full:
            return
        memory = self.grads.memory_of(bucket)
        for piece in self.grads.pieces[bucket.number]:
            parameter = self.flat.parameters[piece.index]
            buffer = memory[piece.offset - bucket.begin :][: parameter.numel()]
            _show_gradient(parameter, buffer.view(parameter.shape))

    def withhold_gradients(self, number: int) -> None:
        """Let the gradients of a unit's parameters go to `.grad`: most of them are computed later,
        and only then there shall be memory for the bucket."""
        parameter: Any
        for index in self.params.units[number].param_indices:
            parameter = self.flat.parameters[index]
            parameter.main_grad = None

    def register_grad_deferred(self, index: int) -> None:
        """Free the parameters of a unit when a backward pass has used the last of them."""
        self._deferred.add(index)
        number = self.unit_of(index)
        if self._deferred.issuperset(self.params.units[number].param_indices):
            self.release(number, Pass.BACKWARD)

    def register_grad_ready(self, index: int, is_final: bool) -> None:
        """Reduce a unit when its last gradient has arrived, and free its parameters."""
        if index in self.grads.arrived:
            # Another backward pass has begun without an end of the last one being seen.
            self.end_backward()
        self.grads.arrived.add(index)
        number, buckets = self.unit_of(index), self.flat.buckets_of[index]
        parameter, unit = self.flat.parameters[index], self.params.units[number]
        for bucket in buckets:
            if parameter.grad is not None and not unit.is_sharded:
                self.prepare_gradients(number)
                accumulate_main_grad(parameter, parameter.grad)
                parameter.grad = None
            self.reducer.mark_grad_ready(bucket)
        self._drop_reduced(index)
        if unit.is_complete:
            self.release(number, Pass.BACKWARD)

    def _drop_reduced(self, index: int) -> None:
        """Drop a `.grad` that all buckets have taken."""
        if all(bucket.is_launched for bucket in self.flat.buckets_of[index]):
            self.flat.parameters[index].grad = None

    def _reduce(self, bucket: Bucket) -> Work[None]:
        if self.params.units[self.unit_of(bucket.param_indices[0])].is_sharded:
            # Not before: a norm is done when backward begins, and its bucket would be in the way.
            for index in bucket.param_indices:
                self.grads.take(index, bucket)
                self._drop_reduced(index)
        elif bucket.number in self.grads.full:
            for index in bucket.param_indices:
                parameter: Any = self.flat.parameters[index]
                if not parameter.main_grad_is_fresh:
                    self.grads.filled[bucket.number].add(index)
                _show_gradient(parameter, self._no_gradient[index])
        return self.grads.reduce(bucket, self.reducer)

    def end_backward(self) -> None:
        """See `ZeroStage`."""
        self.grads.end_backward(self.reducer)

    def finish_reductions(self) -> None:
        """Reduce what is left, and wait; no unit stays unsharded, as the update will change it."""
        self.grads.finish_reductions(self.reducer)
        self.wait_for_readers()
        self.params.trim()
        # The next logits need the memory first.
        self.grads.pool.trim()

    def owned_gradients(self) -> list[Tensor]:
        """See `ZeroStage`."""
        return self.grads.sums

    def spans(self) -> list[ShardSpan]:
        """Return this rank's shard of each bucket."""
        pairs = zip(self.grads.ranges, self.grads.sums, strict=True)
        values_of = self.params.values_of
        return [self.flat.span(begin, end, total, values_of) for (begin, end), total in pairs]


def _show_gradient(parameter: Any, buffer: Tensor | None) -> None:
    """Let `main_grad` be `buffer`, to be overwritten by the first writer."""
    parameter.main_grad = buffer
    parameter.main_grad_is_fresh = True
