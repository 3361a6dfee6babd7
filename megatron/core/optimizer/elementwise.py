"""Update rules on flat pieces of parameters, for state that is visited piece by piece.

The same kernels as the whole-tensor rules use, so the bits are the same: pieces begin at multiples
of 128 elements, and no element depends on another.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.optim.adam import adam
from torch.optim.adamw import adamw
from torch.optim.sgd import sgd

from megatron.core.optimizer.lion import lion_update
from megatron.core.optimizer.optimizer_config import OptimizerConfig

States = Mapping[str, Sequence[Tensor]]
"""name -> one flat fp32 tensor per piece."""


@dataclass(frozen=True)
class Pieces:
    """Pieces of parameters of one group, and all that one update of them needs."""

    weights: list[Tensor]
    gradients: list[Tensor]
    """Both flat and fp32; gradients may be changed."""
    states: States
    settings: Mapping[str, Any]
    """ "lr" and "weight_decay" of the group, and the constants of the rule if it has its own."""
    step: int
    """Updates before this one."""
    factor: float
    """On the gradients."""

    def scaling(self) -> dict[str, Any]:
        """Return the arguments by which a fused kernel divides gradients as it reads them."""
        if self.factor == 1.0:
            return {}
        device = self.weights[0].device
        return {
            "grad_scale": torch.tensor(1.0 / self.factor, device=device),
            "found_inf": torch.tensor(0.0, device=device),
        }


class ElementwiseRule(Protocol):
    """Updates pieces in place."""

    @property
    def state_names(self) -> tuple[str, ...]:
        """Names of the state tensors, as in checkpoints."""
        ...

    def update(self, pieces: Pieces) -> None:
        """Apply one update."""
        ...


@dataclass(frozen=True)
class ElementwiseAdam:
    """Adam, with decoupled weight decay or without."""

    betas: tuple[float, float]
    eps: float
    decouples_decay: bool
    state_names: tuple[str, ...] = ("exp_avg", "exp_avg_sq")

    def update(self, pieces: Pieces) -> None:
        """See `ElementwiseRule`."""
        device = pieces.weights[0].device
        beta1, beta2 = pieces.settings.get("betas", self.betas)
        (adamw if self.decouples_decay else adam)(
            pieces.weights,
            pieces.gradients,
            list(pieces.states["exp_avg"]),
            list(pieces.states["exp_avg_sq"]),
            [],
            [torch.full((), float(pieces.step), device=device) for _ in pieces.weights],
            fused=True,
            amsgrad=False,
            beta1=beta1,
            beta2=beta2,
            lr=pieces.settings["lr"],
            weight_decay=pieces.settings["weight_decay"],
            eps=pieces.settings.get("eps", self.eps),
            maximize=False,
            **pieces.scaling(),
        )


@dataclass(frozen=True)
class ElementwiseSGD:
    """SGD with momentum."""

    momentum: float
    state_names: tuple[str, ...] = ("momentum_buffer",)

    def update(self, pieces: Pieces) -> None:
        """See `ElementwiseRule`."""
        sgd(
            pieces.weights,
            pieces.gradients,
            list(pieces.states["momentum_buffer"]),
            fused=True,
            weight_decay=pieces.settings["weight_decay"],
            momentum=pieces.settings.get("momentum", self.momentum),
            lr=pieces.settings["lr"],
            dampening=0.0,
            nesterov=False,
            maximize=False,
            **pieces.scaling(),
        )


@dataclass(frozen=True)
class ElementwiseLion:
    """Lion."""

    betas: tuple[float, float]
    state_names: tuple[str, ...] = ("exp_avg",)

    def update(self, pieces: Pieces) -> None:
        """See `ElementwiseRule`."""
        for weight, gradient, moment in zip(
            pieces.weights, pieces.gradients, pieces.states["exp_avg"], strict=True
        ):
            lion_update(
                weight,
                gradient if pieces.factor == 1.0 else gradient.mul_(pieces.factor),
                moment,
                lr=pieces.settings["lr"],
                betas=pieces.settings.get("betas", self.betas),
                weight_decay=pieces.settings["weight_decay"],
            )


def elementwise_rule(name: str, config: OptimizerConfig) -> ElementwiseRule:
    """Return the rule of a group's "optimizer"."""
    if name == "lion":
        return ElementwiseLion((config.lion_beta1, config.lion_beta2))
    if name == "sgd":
        return ElementwiseSGD(config.sgd_momentum)
    betas = (config.adam_beta1, config.adam_beta2)
    return ElementwiseAdam(betas, config.adam_eps, config.decoupled_weight_decay)
