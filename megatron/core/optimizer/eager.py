"""Torch's optimizers without torch's compiler.

Several methods of `torch.optim` import `torch._dynamo` the first time they are called, to say that
a graph ends there: 1.6 s of a processor and 70 MB of each process (torch 2.13, x86). Here the same
methods run as they were written, before torch wrapped them.
"""

from __future__ import annotations

import inspect
from typing import TypeVar

import torch

_Kind = TypeVar("_Kind", bound=torch.optim.Optimizer)


class EagerOptimizer(torch.optim.Optimizer):
    """Base of optimizers that nobody compiles."""

    add_param_group = inspect.unwrap(torch.optim.Optimizer.add_param_group)
    zero_grad = inspect.unwrap(torch.optim.Optimizer.zero_grad)


def eager(kind: type[_Kind]) -> type[_Kind]:
    """Return a class of `torch.optim` whose step does not differentiate and is not compiled."""
    step = torch.no_grad()(inspect.unwrap(kind.step))
    return type(kind.__name__, (EagerOptimizer, kind), {"step": step, "__doc__": kind.__doc__})
