"""xIELU: an activation with two learned scalars.

A. H. Huang, I. Schlag, "Deriving Activation Functions Using Integration", arXiv 2411.13010:

    x > 0:   p x^2 + beta x,                      p = softplus(alpha_p)
    x <= 0:  n (exp(min(x, eps)) - 1 - x) + beta x,   n = beta + softplus(alpha_n)
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from megatron.core.parameters.param_meta import in_rows
from megatron.core.tensor_parallel.parallel_parameters import ParallelLayer, device_of_parameters
from megatron.core.topology.group import Group
from megatron.core.transformer.transformer_config import TransformerConfig

_INITIAL_SLOPE, _BETA, _EPS = 0.8, 0.5, -1e-6
"""Initial p and n, beta, eps (Apertus)."""


class _Xielu(torch.autograd.Function):
    """xIELU of x [...] in the dtype of p and n, which broadcast to x; backward reads x alone."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, slope_p: Tensor, slope_n: Tensor, beta: Tensor, eps: Tensor
    ) -> Tensor:
        ctx.save_for_backward(x, slope_p, slope_n, beta, eps)
        wide = x.to(slope_p.dtype)
        below = slope_n * (torch.expm1(wide.clamp(max=eps)) - wide)
        return torch.where(x > 0, slope_p * wide * wide, below).add_(wide * beta).to(x.dtype)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        own, slope_p, slope_n, beta, eps = ctx.saved_tensors
        x, grad = own.to(slope_p.dtype), grad.to(slope_p.dtype)
        is_positive, power = x > 0, torch.expm1(x.clamp(max=eps))
        # Below eps the derivative of exp(x) - 1 - x is exp(x) - 1, above it -1.
        slope = torch.where(
            is_positive, 2 * slope_p * x, slope_n * torch.where(x < eps, power, -1.0)
        )
        of_p = torch.where(is_positive, grad * x * x, 0.0).sum_to_size(slope_p.shape)
        of_n = torch.where(is_positive, 0.0, grad * (power - x)).sum_to_size(slope_n.shape)
        return (grad * (slope + beta)).to(own.dtype), of_p, of_n, None, None


class XIELU(ParallelLayer):
    """The activation of one MLP, whose width is split over the tensor-parallel ranks.

    Every rank holds both scalars; their gradients are partial sums over the ranks' channels.
    """

    alpha_p: Tensor
    alpha_n: Tensor
    beta: Tensor
    eps: Tensor

    def __init__(self, config: TransformerConfig, tp_group: Group) -> None:
        super().__init__(config, tp_group=tp_group)
        for name, slope in (("alpha_p", _INITIAL_SLOPE), ("alpha_n", _INITIAL_SLOPE - _BETA)):
            inverse = torch.tensor(slope, dtype=torch.float64).expm1().log().item()

            def fill(parameter: Tensor, value: float = inverse) -> None:
                torch.nn.init.constant_(parameter, value)

            parameter = self.new_parameter(
                1, init_method=fill, split_dim=None, partial_grad_axes=("tp",)
            )
            self.register_parameter(name, parameter)
        for name, constant in (("beta", _BETA), ("eps", _EPS)):
            device = device_of_parameters(config)
            constants = torch.tensor([constant], dtype=config.params_dtype, device=device)
            self.register_buffer(name, constants)

    def forward(self, x: Tensor) -> Tensor:
        """Apply the activation to x [..., f/tp], in fp32 or wider; the result has the dtype of x.

        In layout-invariant mode the gradients of the scalars are exact sums over all elements.
        """
        wide = torch.promote_types(x.dtype, torch.float32)
        if self.config.layout_invariant_mode:
            alphas = [in_rows(a, x.shape, wide) for a in (self.alpha_p, self.alpha_n)]
        else:
            alphas = [a.to(wide) for a in (self.alpha_p, self.alpha_n)]
        beta, eps = self.beta.to(wide), self.eps.to(wide)
        slope_p, slope_n = F.softplus(alphas[0]), beta + F.softplus(alphas[1])
        activated: Tensor = _Xielu.apply(x, slope_p, slope_n, beta, eps)
        return activated
