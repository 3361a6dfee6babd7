"""Lion: the sign of an interpolated momentum.

X. Chen et al., "Symbolic Discovery of Optimization Algorithms", algorithm 2, arXiv 2302.06675.
One moment instead of Adam's two. Every weight changes by the learning rate, which is therefore
three to ten times smaller than Adam's; the weight decay is larger by the same factor.
"""

from __future__ import annotations

import torch
from torch.optim.optimizer import ParamsT

from megatron.core.optimizer.definition import (
    ElementwiseOptimizer,
    ElementwiseUpdate,
    OptimizerDefinition,
    Pieces,
)


def update_lion(pieces: Pieces) -> None:
    """Update `pieces` in place."""
    beta1, beta2 = pieces.settings["betas"]
    lr, weight_decay = pieces.settings["lr"], pieces.settings["weight_decay"]
    moments = pieces.states["exp_avg"]
    for weight, gradient, moment in zip(
        pieces.weights, pieces.scaled_gradients(), moments, strict=True
    ):
        direction = torch.lerp(moment, gradient, 1.0 - beta1).sign_()
        weight.mul_(1.0 - lr * weight_decay).add_(direction, alpha=-lr)
        moment.lerp_(gradient, 1.0 - beta2)


OPTIMIZER = OptimizerDefinition(
    name="lion",
    state_names=("exp_avg",),
    constants=lambda config: {"betas": (config.lion_beta1, config.lion_beta2)},
    update=lambda _config: update_lion,
)


class Lion(ElementwiseOptimizer):
    """Lion as a torch optimizer."""

    def __init__(
        self,
        params: ParamsT,
        lr: float = 1e-4,
        betas: tuple[float, float] = (0.95, 0.98),
        weight_decay: float = 0.0,
    ) -> None:
        """
        Args:
            betas: weight of the moment in the update, and its decay. The defaults are the paper's
                values for language models.
            weight_decay: decoupled, as in AdamW.
        """
        update = ElementwiseUpdate(OPTIMIZER.state_names, update_lion, {"betas": betas})
        super().__init__(params, update, lr=lr, weight_decay=weight_decay)
