"""Drop activations after forward and form them again in backward.

(Training Deep Nets with Sublinear Memory Cost, arXiv 1604.06174; selective recomputation:
arXiv 2205.05198, section 5.) Recomputation draws the same random numbers: the keyed scope of
`rng_state()`, torch's default generators and the streams of the tracker are put back.

Shapes: `s` sequence, `b` micro batch, `h` hidden.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch
import torch.utils.checkpoint
from torch import Tensor

from megatron.core.foundation.device import default_generator_state, set_default_generator_state
from megatron.core.foundation.errors import refuse_given
from megatron.core.parameters.rng import rng_state
from megatron.core.process_groups_config import resolve_group
from megatron.core.step_context.context import (
    current_step,
    values_for_recomputation,
    within_step,
)
from megatron.core.tensor_parallel.rng_tracker import (
    get_cuda_rng_tracker,
)
from megatron.core.topology.group import Group
from megatron.core.transport import collectives


def is_recomputing() -> bool:
    """Return whether what runs has run before: what is counted was counted then."""
    return current_step().is_recomputing


def checkpoint(
    function: Callable[..., object],
    distribute_saved_activations: bool,
    *args: object,
    tp_group: Group | None = None,
) -> Any:
    """Call `function(*args)`; keep its arguments only, and call it again in backward.

    Args:
        function: returns a tensor or a tuple; `functools.partial` carries keyword arguments.
        distribute_saved_activations: keep of the first argument (equal on all ranks) only this
            rank's part, and collect the parts again in backward.
        args: tensors or anything else; kept until backward.
        tp_group: group for `distribute_saved_activations`; None is that of the current
            collection.
    Communication:
        what `function` does, a second time in backward; when distributing, one all-gather of the
        first argument and one of its gradient.
    """
    if not torch.is_grad_enabled():
        return function(*args)
    if distribute_saved_activations:
        function, args = _distribute_saved_input(function, args, resolve_group(tp_group, "tp"))
    return torch.utils.checkpoint.checkpoint(
        function, *args, use_reentrant=False, context_fn=_contexts
    )


def _contexts() -> tuple[AbstractContextManager[None], AbstractContextManager[None]]:
    """Return what surrounds the first call and the recomputation.

    torch itself restores the default generators.
    """
    values, streams = values_for_recomputation(), get_cuda_rng_tracker().get_states()
    return within_step(is_checkpointed=True), _recompute_contexts(values, streams)


@contextmanager
def _recompute_contexts(values: dict[str, object], streams: dict[str, Tensor]) -> Iterator[None]:
    """Give the step context its `values` again, and draw tracked numbers from `streams` again."""
    tracker = get_cuda_rng_tracker()
    outer = tracker.get_states()
    if streams:
        tracker.set_states(streams)
    try:
        with within_step(**values, is_checkpointed=True, is_recomputing=True):
            yield
    finally:
        if streams:
            tracker.set_states(outer)


# Distributed arguments ----------------------------------------------------------------------


def _distribute_saved_input(
    function: Callable[..., Any], args: tuple[Any, ...], group: Group
) -> tuple[Callable[..., Any], tuple[Any, ...]]:
    """Replace the first argument by this rank's part of it."""
    size = group.size()
    first = args[0] if args else None
    if size == 1 or not isinstance(first, Tensor) or first.numel() % size:
        return function, args
    shape, full = first.shape, [first.detach()]

    def from_shard(shard: Tensor, *rest: Any) -> Any:
        # The first call has the full tensor at hand; the second must collect it.
        known = full.pop() if full else None
        return function(_GatherSaved.apply(shard, known, shape, group), *rest)

    return from_shard, (_KeepShard.apply(first, group), *args[1:])


class _KeepShard(torch.autograd.Function):
    """[s, b, h] -> this rank's part of the flattened tensor; backward gathers."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Group) -> Tensor:
        ctx.group, ctx.shape = group, x.shape
        return _shard_of(x, group)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return collectives.all_gather(grad, ctx.group).view(ctx.shape), None


class _GatherSaved(torch.autograd.Function):
    """The inverse of `_KeepShard`. All ranks compute the same gradient: backward takes a shard."""

    @staticmethod
    def forward(
        ctx: Any, shard: Tensor, known: Tensor | None, shape: torch.Size, group: Group
    ) -> Tensor:
        ctx.group = group
        full = collectives.all_gather(shard, group) if known is None else known
        return full.view(shape)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None]:
        return _shard_of(grad, ctx.group), None, None, None


def _shard_of(x: Tensor, group: Group) -> Tensor:
    length = x.numel() // group.size()
    return x.reshape(-1).narrow(0, group.rank() * length, length).clone()


# Outputs without storage --------------------------------------------------------------------


class CheckpointWithoutOutput:
    """Recompute a cheap function whose *output* is the memory: a norm, an activation.

    The output is freed once its consumer has used it, and comes back just before the consumer's
    backward:

        part = CheckpointWithoutOutput()
        y = part.checkpoint(norm, x)
        z = linear(y)
        part.discard_output_and_register_recompute(z)

    One object serves one call. Inside `checkpoint`, which drops everything anyway, it does
    nothing; neither in a layer that is passed several times, since the gradients of its parameters
    would come one by one, each from a backward pass of its own, and the first would count as all.
    """

    def __init__(self, fp8: bool = False) -> None:
        rule = "nothing computes in FP8"
        refuse_given("CheckpointWithoutOutput", {"fp8": fp8}, rule=rule, fix="leave it out")
        self._outputs: tuple[Tensor, ...] = ()
        self._node: Any = None

    def checkpoint(self, run_function: Callable[..., object], *args: object) -> Any:
        """Call `run_function(*args)`, which returns a tensor or a tuple of tensors.

        Where no argument has a gradient (below frozen weights) its output is kept: parameters of
        the function itself get theirs through an argument that has one.
        """
        has_gradient = any(isinstance(a, Tensor) and a.requires_grad for a in args)
        keeps = current_step().is_checkpointed or rng_state().scope.pass_index
        if not torch.is_grad_enabled() or not has_gradient or keeps:
            return run_function(*args)
        outputs = _WithoutOutput.apply(run_function, self, *args)
        self._outputs = (outputs,) if isinstance(outputs, Tensor) else outputs
        return outputs

    def discard_output_and_register_recompute(self, hook_tensor: Tensor) -> None:
        """Free the output now; form it again when the gradient of `hook_tensor` is there.

        Args:
            hook_tensor: computed from the output, which nothing else uses from here on.
        """
        if not self._outputs or not hook_tensor.requires_grad:
            return
        for output in self._outputs:
            storage = output.untyped_storage()
            if storage.nbytes() == output.numel() * output.element_size():
                storage.resize_(0)
        hook_tensor.register_hook(self._recompute)

    def _recompute(self, _grad: Tensor) -> None:
        """Run the function again and refill the storages that its output had."""
        if self._node is None:
            return
        recomputed = self._node.run_again()
        with torch.no_grad():
            for output, again in zip(self._outputs, recomputed, strict=True):
                storage, source = output.untyped_storage(), again.detach().contiguous()
                if storage.nbytes() == 0 and source.numel():
                    storage.resize_(source.numel() * source.element_size())
                    # Not `output.copy_`: the consumer would see a changed version.
                    output.data.copy_(source)
        self._outputs, self._node = (), None


class _WithoutOutput(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, function: Callable[..., Any], owner: CheckpointWithoutOutput, *args: Any
    ) -> Any:
        ctx.values, ctx.streams = values_for_recomputation(), get_cuda_rng_tracker().get_states()
        ctx.cpu_state = torch.get_rng_state()
        ctx.device_state = default_generator_state()
        ctx.function, ctx.recomputed, ctx.inputs = function, None, ()
        ctx.others = tuple(None if isinstance(a, Tensor) else a for a in args)
        ctx.is_tensor = tuple(isinstance(a, Tensor) for a in args)
        ctx.save_for_backward(*(a for a in args if isinstance(a, Tensor)))
        owner._node = _Node(ctx)
        return function(*args)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        recomputed = _Node(ctx).run_again() if ctx.recomputed is None else ctx.recomputed
        pairs = [
            (y, g)
            for y, g in zip(recomputed, grads, strict=True)
            if g is not None and y.requires_grad
        ]
        torch.autograd.backward([y for y, _ in pairs], [g for _, g in pairs])
        found = tuple(a.grad if isinstance(a, Tensor) else None for a in ctx.inputs)
        ctx.recomputed, ctx.inputs = None, ()
        return None, None, *found


class _Node:
    """Runs the function of one `_WithoutOutput` again, with a graph of its own."""

    def __init__(self, ctx: Any) -> None:
        self._ctx = ctx

    def run_again(self) -> tuple[Tensor, ...]:
        """Return the outputs, and keep them with their detached inputs for the backward."""
        ctx = self._ctx
        tensors = iter(ctx.saved_tensors)
        needs_grad = ctx.needs_input_grad[2:]
        inputs = tuple(
            next(tensors).detach().requires_grad_(needs) if is_tensor else other
            for is_tensor, other, needs in zip(ctx.is_tensor, ctx.others, needs_grad, strict=True)
        )
        outer_cpu, outer_device = torch.get_rng_state(), default_generator_state()
        torch.set_rng_state(ctx.cpu_state)
        set_default_generator_state(ctx.device_state)
        try:
            with _recompute_contexts(ctx.values, ctx.streams), torch.enable_grad():
                outputs = ctx.function(*inputs)
        finally:
            torch.set_rng_state(outer_cpu)
            set_default_generator_state(outer_device)
        ctx.inputs = inputs
        ctx.recomputed = (outputs,) if isinstance(outputs, Tensor) else tuple(outputs)
        return ctx.recomputed
