"""Warn if a plain torch optimizer finds no gradients because they are in `main_grad`.

`DistributedDataParallel` accumulates gradients in `main_grad`; `.grad` stays None. torch's
optimizers skip a parameter without `.grad`: they would train nothing, without a warning.
"""

from __future__ import annotations

import functools
import warnings
from typing import Any

from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_pre_hook


@functools.cache
def watch_plain_optimizers() -> None:
    """Check every step of any torch optimizer from the first call on, and warn once."""
    has_warned = False

    # The hook stays after its warning: torch iterates over the hooks while it calls them.
    def before_step(optimizer: Optimizer, *_: Any) -> None:
        nonlocal has_warned
        if not has_warned and _finds_nothing(optimizer):
            has_warned = True
            warnings.warn(
                f"{type(optimizer).__name__}.step() updates nothing: the gradients of its"
                " parameters are in main_grad of DistributedDataParallel, and .grad is None."
                " Build the optimizer with megatron.core.optimizer.get_megatron_optimizer, or"
                " set p.grad = p.main_grad.to(p.dtype) after finalize_model_grads (where"
                " gradients are not sharded).",
                stacklevel=2,
            )

    register_optimizer_step_pre_hook(before_step)


def _finds_nothing(optimizer: Optimizer) -> bool:
    """Return whether all gradients of an optimizer's parameters are in `main_grad`."""
    has_main = False
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            if parameter.grad is not None:
                return False
            has_main = has_main or hasattr(parameter, "main_grad")
    return has_main
