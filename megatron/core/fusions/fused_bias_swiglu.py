"""SwiGLU: silu(gate) * up (arXiv 2002.05202), with an optional bias."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor

from megatron.core.kernels.gated_activation import gated


def swiglu(y: Tensor) -> Tensor:
    """Return silu(gate) * up of y [..., 2f] (gate first) as [..., f]."""
    return gated(y, F.silu)


def bias_swiglu_impl(
    input: Tensor,
    bias: Tensor | None,
    fp8_input_store: bool = False,
    cpu_offload_input: bool = False,
) -> Tensor:
    """Return swiglu(input + bias).

    Args:
        input: [s, b, 2f] or [t, 2f], gate first.
        bias: [2f] or None.
        fp8_input_store, cpu_offload_input: accepted for compatibility; the input is kept as is.
    """
    return gated(input if bias is None else input + bias, F.silu)


def weighted_bias_swiglu_impl(
    input: Tensor, bias: Tensor | None, weights: Tensor, fp8_input_store: bool = False
) -> Tensor:
    """Return swiglu(input + bias) * weights, in the input's dtype.

    Args:
        input: [t, 2f], gate first.
        weights: [t, 1], the routing probability of each token.
    """
    return (bias_swiglu_impl(input, bias) * weights).to(input.dtype)
