"""Modules that return their input, for parts that a layer does not have."""

from __future__ import annotations

from typing import Any

import torch


class IdentityOp(torch.nn.Module):
    """Return the first argument. Constructed with, and called with, any arguments."""

    def __init__(self, *args: object, **kwargs: object) -> None:
        super().__init__()

    def forward(self, x: object, *args: object, **kwargs: object) -> Any:
        """Return `x` itself."""
        return x


class IdentityFuncOp(IdentityOp):
    """Return `IdentityOp.forward`: for parts that are called twice, such as bias-dropout-add."""

    def forward(self, *args: object, **kwargs: object) -> Any:
        """Return a function that returns its first argument."""
        return super().forward
