"""LayerNorm and RMSNorm.

LayerNorm: J. L. Ba, J. R. Kiros, G. E. Hinton, "Layer Normalization", arXiv 1607.06450.
RMSNorm: B. Zhang, R. Sennrich, "Root Mean Square Layer Normalization", arXiv 1910.07467.

The kernels are chosen from `megatron.core.kernels.norms`.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from megatron.core.kernels.norms import LAYER_NORM, RMS_NORM, norm_request
from megatron.core.parameters.param_meta import ParamMeta, set_param_meta


class _RowNorm(nn.Module):
    """What both norms share: a weight over the last dimension, and its metadata."""

    def __init__(
        self,
        hidden_size: int,
        eps: float = 1e-5,
        *,
        sequence_parallel: bool = False,
        zero_centered_gamma: bool = False,
        dtype: torch.dtype | None = None,
        device: torch.device | str | None = None,
    ) -> None:
        super().__init__()
        self.hidden_size = hidden_size
        self.eps = eps
        self.zero_centered_gamma = zero_centered_gamma
        self.sequence_parallel = sequence_parallel
        self.weight = nn.Parameter(torch.empty(hidden_size, dtype=dtype, device=device))

    def reset_parameters(self) -> None:
        """Make the norm a pure normalisation: weight 1 (stored as 0 if zero-centred), bias 0."""
        nn.init.constant_(self.weight, 0.0 if self.zero_centered_gamma else 1.0)

    def _attach_metadata(self) -> None:
        # Under sequence parallelism a rank normalises s/tp rows: its gradient is a partial sum.
        axes = ("tp",) if self.sequence_parallel else ()
        for parameter in self.parameters(recurse=False):
            set_param_meta(parameter, ParamMeta(grad_sum_axes=axes))

    def scale(self) -> Tensor:
        """Return the factor on the normalised activations, [hidden_size].

        A zero-centred one is in fp32: 1 + weight in bf16 would lose most of a small weight.
        """
        return self.weight.float() + 1.0 if self.zero_centered_gamma else self.weight

    def extra_repr(self) -> str:
        """Return size and epsilon."""
        return f"{self.hidden_size}, eps={self.eps:g}"


class LayerNorm(_RowNorm):
    """(x - mean) / sqrt(var + eps) * weight + bias over the last dimension of x [..., h]."""

    def __init__(self, hidden_size: int, eps: float = 1e-5, **options: Any) -> None:
        super().__init__(hidden_size, eps, **options)
        self.bias = nn.Parameter(torch.empty_like(self.weight))
        self.reset_parameters()
        self._attach_metadata()

    def reset_parameters(self) -> None:
        """Make the norm a pure normalisation."""
        super().reset_parameters()
        nn.init.zeros_(self.bias)

    def forward(self, x: Tensor) -> Tensor:
        """Normalise x [..., h]; the result has the dtype and shape of x."""
        weight = self.scale()
        kernel = LAYER_NORM.choose(norm_request(x, weight, self.training)).kernel
        return kernel.run(x, weight, self.bias, self.eps)


class RMSNorm(_RowNorm):
    """x / sqrt(mean(x^2) + eps) * weight over the last dimension of x [..., h]."""

    def __init__(self, hidden_size: int, eps: float = 1e-5, **options: Any) -> None:
        super().__init__(hidden_size, eps, **options)
        self.reset_parameters()
        self._attach_metadata()

    def forward(self, x: Tensor) -> Tensor:
        """Normalise x [..., h]; the result has the dtype and shape of x."""
        weight = self.scale()
        kernel = RMS_NORM.choose(norm_request(x, weight, self.training)).kernel
        return kernel.run(x, weight, self.eps)
