"""Stands in for Apex's fused Adam where `interop_peer` runs without a GPU.

Megatron's distributed optimizer stores and loads moments by parameter only with Apex's or
Transformer Engine's Adam, which count steps per group; torch's counts them per parameter, where the
other program does not expect it. Both need a GPU. What matters here is how they keep their state;
the update is that of "Decoupled Weight Decay Regularization", algorithm 2 (arXiv 1711.05101).
"""

import sys
from types import ModuleType

import torch


class FusedAdam(torch.optim.Optimizer):
    """AdamW with the arguments and the state of Apex's: `step` in the group, moments per
    parameter."""

    def __init__(self, params, lr=1e-3, betas=(0.9, 0.999), eps=1e-8, weight_decay=0.0, **options):
        self.adam_w_mode = options.pop("adam_w_mode", True)
        defaults = {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay}
        super().__init__(params, defaults | {"bias_correction": True})

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            group["step"] = group.get("step", 0) + 1
            beta1, beta2 = group["betas"]
            for parameter in group["params"]:
                if parameter.grad is not None:
                    state = self.state[parameter]
                    for name in ("exp_avg", "exp_avg_sq"):
                        state.setdefault(name, torch.zeros_like(parameter))
                    state["exp_avg"].lerp_(parameter.grad, 1 - beta1)
                    state["exp_avg_sq"].lerp_(parameter.grad.square(), 1 - beta2)
                    mean = state["exp_avg"] / (1 - beta1 ** group["step"])
                    square = state["exp_avg_sq"] / (1 - beta2 ** group["step"])
                    parameter.mul_(1 - group["lr"] * group["weight_decay"])
                    parameter.sub_(group["lr"] * mean / (square.sqrt() + group["eps"]))


class FusedSGD(torch.optim.SGD):
    """Imported by the other program, not used."""


def stand_in_for_apex() -> None:
    """Let `from apex.optimizers import FusedAdam` find the one above.

    There is no `apex` to import, so that no layer takes this for the whole of it.
    """
    optimizers = ModuleType("apex.optimizers")
    optimizers.FusedAdam, optimizers.FusedSGD = FusedAdam, FusedSGD
    sys.modules["apex.optimizers"] = optimizers
