"""SwiGLU: silu(gate) * up (arXiv 2002.05202), with an optional bias."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor

from megatron.core.foundation.errors import refuse_given
from megatron.core.kernels.gated_activation import Gate, gated


def swiglu(y: Tensor) -> Tensor:
    """Return silu(gate) * up of y [..., 2f] (gate first) as [..., f]."""
    return gated(y, Gate(F.silu))


def _refuse_fp8(function: str, fp8_input_store: bool) -> None:
    rule = "activations are kept in the dtype that they are computed in"
    refuse_given(function, {"fp8_input_store": fp8_input_store}, rule=rule, fix="leave it out")


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
        fp8_input_store: must be False: the input is kept as it is.
        cpu_offload_input: accepted for compatibility.
    """
    _refuse_fp8("bias_swiglu_impl", fp8_input_store)
    return gated(input, Gate(F.silu), bias=bias)


def weighted_bias_swiglu_impl(
    input: Tensor, bias: Tensor | None, weights: Tensor, fp8_input_store: bool = False
) -> Tensor:
    """Return swiglu(input + bias) * weights, in the input's dtype.

    Args:
        input: [t, 2f], gate first.
        weights: [t, 1], the routing probability of each token.
        fp8_input_store: must be False: the input is kept as it is.
    """
    _refuse_fp8("weighted_bias_swiglu_impl", fp8_input_store)
    return gated(input, Gate(F.silu), bias=bias, weights=weights.squeeze(-1))
