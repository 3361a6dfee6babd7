"""Lion: the sign of an interpolated momentum.

X. Chen et al., "Symbolic Discovery of Optimization Algorithms", algorithm 2, arXiv 2302.06675.
One moment instead of Adam's two. Every weight moves by the learning rate, so that rate is three
to ten times smaller than Adam's, and the weight decay larger by the same factor.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor
from torch.optim.optimizer import ParamsT


class Lion(torch.optim.Optimizer):
    """Elementwise, so it works on any shard of a parameter."""

    def __init__(
        self,
        params: ParamsT,
        lr: float = 1e-4,
        betas: tuple[float, float] = (0.95, 0.98),
        weight_decay: float = 0.0,
    ) -> None:
        """
        Args:
            betas: weight of the moment in the update, and its decay. The defaults are those that
                the paper uses for language models.
            weight_decay: decoupled, as in AdamW.
        """
        super().__init__(params, {"lr": lr, "betas": betas, "weight_decay": weight_decay})

    def initialize_state(self) -> None:
        """Allocate the moments that the first update would allocate."""
        for group in self.param_groups:
            for parameter in group["params"]:
                if "exp_avg" not in self.state[parameter]:
                    self.state[parameter]["exp_avg"] = torch.zeros_like(parameter)

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
        """Update every parameter that has a gradient."""
        if closure is not None:
            raise TypeError(f"{type(self).__name__}.step() takes no closure: gradients are ready")
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is None:
                    continue
                state = self.state[parameter]
                if "exp_avg" not in state:
                    state["exp_avg"] = torch.zeros_like(parameter)
                lion_update(
                    parameter,
                    parameter.grad,
                    state["exp_avg"],
                    lr=group["lr"],
                    betas=group["betas"],
                    weight_decay=group["weight_decay"],
                )


def lion_update(
    weight: Tensor,
    gradient: Tensor,
    moment: Tensor,
    *,
    lr: float,
    betas: tuple[float, float],
    weight_decay: float,
) -> None:
    """Update `weight` and `moment` in place; all of one shape, fp32."""
    direction = torch.lerp(moment, gradient, 1.0 - betas[0]).sign_()
    weight.mul_(1.0 - lr * weight_decay).add_(direction, alpha=-lr)
    moment.lerp_(gradient, 1.0 - betas[1])
