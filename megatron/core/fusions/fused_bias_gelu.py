"""GELU in its tanh form, of a biased input (arXiv 1606.08415, section 2)."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor


def bias_gelu_impl(input: Tensor, bias: Tensor | None) -> Tensor:
    """Return gelu(input + bias) with the tanh approximation.

    torch's kernel saves only one tensor for backward. On the CPU a linear layer adds its bias at no
    cost while it writes its output; prefer that, and pass None.

    Args:
        input: [s, b, f] or [t, f].
        bias: [f] or None.
    """
    return F.gelu(input if bias is None else input + bias, approximate="tanh")
