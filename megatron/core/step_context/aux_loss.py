"""Auxiliary losses, such as a router's load balancing loss; only backward uses them.

A layer in the middle of a pipeline has no access to the loss function. It attaches its auxiliary
loss to a tensor that it passes on; when this tensor receives its gradient, the auxiliary loss
receives its own. In every layout, and for every divisor of the main loss, the auxiliary loss is a
mean over the micro batches of the step.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from megatron.core.step_context.context import current_step


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
