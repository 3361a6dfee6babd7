"""State of the step for the code below the schedule: one object instead of a global per module.

A layer has no argument for its micro batch, for its recomputation, or for the deferral of its
weight gradient. The schedule and activation recomputation set these fields here, and the modules
that need them (`rng`, `aux_loss`, `deferred_wgrad`, `tensor_parallel.random`, `overlap`) read and
write their own field. Where a forward and a backward overlap, each half has a context of its own.

Not a `ContextVar`: autograd runs the backward of CUDA tensors on a thread of its own, which would
see the defaults.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any
from weakref import ref

import torch
from torch import Tensor

from megatron.core.step_context.random_scope import RandomScope

if TYPE_CHECKING:
    from megatron.core.topology.group import Group

WeightGradient = Callable[[], None]
"""Computes one weight gradient and adds it to the gradient of the parameter."""


@dataclass(frozen=True)
class AuxLossScale:
    """The weight of the auxiliary losses of one micro batch."""

    factor: float = 1.0
    """1 / micro batches of the step, times the number of ranks that share a micro batch if
    gradients will be averaged over them; of losses per token a power of two."""
    per_token: bool = False
    """Gradients will be divided by the tokens of the loss of the whole step."""
    tokens_per_microbatch: Tensor | None = None
    """These tokens, [], divided by the micro batches of all replicas, if they are known before the
    step: then an auxiliary loss is a mean over micro batches too. If they are unknown, a micro
    batch counts by its own tokens, as in Megatron-LM."""
    scale: Callable[[Tensor], Tensor] | None = None
    """The loss scale of fp16."""

    def of(self, num_tokens: Tensor | float, device: torch.device) -> Tensor | float:
        """Return the gradient [] of the auxiliary loss of a micro batch of `num_tokens`, [].

        Args:
            device: device of the result; a number is written there, not copied.
        """
        weight: Tensor | float = self.factor
        if self.per_token:
            known = self.tokens_per_microbatch
            weight = num_tokens if known is None else known
            if self.factor != 1.0:
                weight = weight * self.factor
        if self.scale is None:
            return weight
        if isinstance(weight, Tensor):
            return self.scale(weight.to(device, torch.float32))
        return self.scale(torch.full((), weight, dtype=torch.float32, device=device))


@dataclass
class StepContext:
    """State of the current computation: a micro batch, one half of an overlapped pair, or the
    construction of a model."""

    random_scope: RandomScope = RandomScope()
    """Scope of the next random draw."""
    aux_loss_scale: AuxLossScale = AuxLossScale()
    """Weight of the auxiliary losses of the micro batch in forward."""
    defers_wgrads: bool = False
    """Layers must be able to compute weight gradients separately from input gradients."""
    captured_wgrads: list[WeightGradient] | None = None
    """Receives the weight gradients that the running backward defers; None: it computes them."""
    is_checkpointed: bool = False
    """The running code will be recomputed in backward, or is being recomputed."""
    is_recomputing: bool = False
    """The running code is being recomputed: counters must not count it again."""
    initializes_weights: bool = True
    """New layers fill their weights."""
    allocates_weights: bool = True
    """New models that initialise themselves by name allocate memory for their weights."""
    cp_group: Group | None = None
    """Ranks that split the running micro batch, if they are not the `cp` group of the layout."""
    offload_region: Callable[..., AbstractContextManager[None]] | None = None
    """Called with modules: offloads the tensors that autograd saves inside, except parameters."""
    expert_loads: Sequence[ref[Any]] = ()
    """The `ExpertLoad` of each router of this stage, after the last step."""
    mtp_losses: dict[str, Tensor] | None = None
    """Receives further losses for the report, name -> (sum, count) as fp32 [2], which backward
    fills; None if they are not reported."""
    yield_to_peer: Callable[[], None] | None = None
    """Runs the other half of an overlapped pair until it yields; None outside of a pair."""


_current = StepContext()


def current_step() -> StepContext:
    """Return the context of the current computation."""
    return _current


def switch_to(context: StepContext) -> None:
    """Make another context current, when the other half of an overlapped pair resumes."""
    global _current
    _current = context


def values_for_recomputation() -> dict[str, object]:
    """Return the fields, for `within_step`, that a recomputation of the running code needs."""
    context = current_step()
    return {"random_scope": context.random_scope, "cp_group": context.cp_group}


@contextmanager
def within_step(**values: object) -> Iterator[None]:
    """Inside, fields of the current context have other values."""
    context = _current
    before = {name: getattr(context, name) for name in values}
    for name, value in values.items():
        setattr(context, name, value)
    try:
        yield
    finally:
        for name, value in before.items():
            setattr(context, name, value)


# Auxiliary losses, such as a router's load balancing loss; only backward uses them.
#
# A layer in the middle of a pipeline has no access to the loss function. It attaches its auxiliary
# loss to a tensor that it passes on; when this tensor receives its gradient, the auxiliary loss
# receives its own. In every layout, and for every divisor of the main loss, the auxiliary loss is a
# mean over the micro batches of the step.


def attach_aux_loss(carrier: Tensor, loss: Tensor, num_tokens: Tensor | float) -> Tensor:
    """Return `carrier`; its backward pass also differentiates `loss`.

    Args:
        carrier: any tensor whose gradient will be computed.
        loss: [], this rank's part of the auxiliary loss: the parts of the ranks that share a
            micro batch add up to it.
        num_tokens: tokens of the whole micro batch.
    """
    return _Attached.apply(carrier, loss, current_step().aux_loss_scale.of(num_tokens, loss.device))


class _Attached(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, carrier: Tensor, loss: Tensor, weight: Tensor | float) -> Tensor:
        ctx.weight, ctx.dtype, ctx.device = weight, loss.dtype, loss.device
        return carrier.view_as(carrier)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, None]:
        if isinstance(ctx.weight, Tensor):
            return grad, ctx.weight.to(ctx.device, ctx.dtype), None
        # Filled on the device: a number would be copied to an accelerator.
        return grad, torch.full((), ctx.weight, dtype=ctx.dtype, device=ctx.device), None
