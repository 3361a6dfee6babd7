"""Auxiliary losses, which enter through backward alone, such as a router's load balancing loss.

A layer in the middle of a pipeline never meets the loss function. It attaches its auxiliary loss
to a tensor that it passes on; when the gradient of that tensor arrives, the auxiliary loss receives
its own, weighted as a mean over the micro batches of the step. The schedule says how each micro
batch of the main loss is weighted; auxiliary losses are weighted the same, in every layout.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor


@dataclass(frozen=True)
class AuxLossScale:
    """The weight of the auxiliary losses of one micro batch."""

    factor: float = 1.0
    """1 / micro batches of the step, times the ranks over which gradients will be averaged although
    they share a micro batch."""
    per_token: bool = False
    """Weigh a micro batch by its tokens: gradients will be divided by the tokens of the step."""
    scale: Callable[[Tensor], Tensor] | None = None
    """The loss scale of fp16."""

    def of(self, num_tokens: Tensor | float) -> Tensor | float:
        """Return the gradient [] of the auxiliary loss of a micro batch of `num_tokens`, []."""
        weight: Tensor | float = num_tokens if self.per_token else self.factor
        if self.scale is None:
            return weight
        return self.scale(torch.as_tensor(weight, dtype=torch.float32))


_scale = AuxLossScale()


def set_aux_loss_scale(scale: AuxLossScale) -> None:
    """Set the weight of the auxiliary losses of the following forward passes."""
    global _scale
    _scale = scale


def attach_aux_loss(carrier: Tensor, loss: Tensor, num_tokens: Tensor | float) -> Tensor:
    """Return `carrier`, through whose backward pass `loss` is differentiated, too.

    Args:
        carrier: any tensor whose gradient will be asked for.
        loss: [], this rank's part of the auxiliary loss: the parts of the ranks that share a
            micro batch add up to it.
        num_tokens: tokens of the whole micro batch.
    """
    return _Attached.apply(carrier, loss, _scale.of(num_tokens))


class _Attached(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, carrier: Tensor, loss: Tensor, weight: Tensor | float) -> Tensor:
        ctx.weight, ctx.dtype, ctx.device = weight, loss.dtype, loss.device
        return carrier.view_as(carrier)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, None]:
        return grad, torch.as_tensor(ctx.weight, dtype=ctx.dtype, device=ctx.device), None
