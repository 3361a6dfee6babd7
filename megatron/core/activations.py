"""Activation functions that torch lacks."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor


def squared_relu(x: Tensor) -> Tensor:
    """Return relu(x)^2 of x [...] (Primer, arXiv 2109.08668, section 4)."""
    return F.relu(x).square()


def quick_gelu(x: Tensor) -> Tensor:
    """Return x * sigmoid(1.702 x) of x [...]: about GELU (arXiv 1606.08415, section 2)."""
    return x * torch.sigmoid(1.702 * x)


def fast_gelu(x: Tensor) -> Tensor:
    """Return GELU of x [...] in its tanh approximation (arXiv 1606.08415, section 2)."""
    return F.gelu(x, approximate="tanh")
