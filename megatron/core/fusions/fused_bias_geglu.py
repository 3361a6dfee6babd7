"""GEGLU: gelu(gate) * up (arXiv 2002.05202), with the tanh form of GELU or the quick one."""

from __future__ import annotations

import torch
from torch import Tensor

from megatron.core import activations
from megatron.core.kernels.gated_activation import (
    QUICK_GELU_SLOPE,
    Gate,
    gated,
)


def geglu(y: Tensor) -> Tensor:
    """Return gelu(gate) * up of y [..., 2f] (gate first) as [..., f]."""
    return gated(y, Gate(activations.fast_gelu))


def bias_geglu_impl(input: Tensor, bias: Tensor | None) -> Tensor:
    """Return geglu(input + bias). input: [s, b, 2f] or [t, 2f]; bias: [2f] or None."""
    return gated(input, Gate(activations.fast_gelu), bias=bias)


def quick_gelu(y: Tensor) -> Tensor:
    """Return y * sigmoid(1.702 y) of y [...]: about GELU (arXiv 1606.08415, section 2)."""
    return y * torch.sigmoid(QUICK_GELU_SLOPE * y)


def quick_geglu(y: Tensor) -> Tensor:
    """Return quick_gelu(gate) * up of y [..., 2f] (gate first) as [..., f]."""
    return gated(y, Gate(activations.quick_gelu))


def bias_quick_geglu_impl(input: Tensor, bias: Tensor | None) -> Tensor:
    """Return quick_geglu(input + bias). input: [s, b, 2f] or [t, 2f]; bias: [2f] or None."""
    return gated(input, Gate(activations.quick_gelu), bias=bias)
