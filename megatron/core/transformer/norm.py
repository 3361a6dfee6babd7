"""LayerNorm and RMSNorm.

LayerNorm: J. L. Ba, J. R. Kiros, G. E. Hinton, "Layer Normalization", arXiv 1607.06450.
RMSNorm: B. Zhang, R. Sennrich, "Root Mean Square Layer Normalization", arXiv 1910.07467.

A norm is a class that names its parameters and its table of kernels, and an entry in `NORMS`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from megatron.core.kernels.norms import (
    ADDED_NORM,
    LAYER_NORM,
    RMS_NORM,
    AddedNorm,
    added_norm_apart,
    exact_norm,
    norm_request,
)
from megatron.core.kernels.registry import KernelTable, Request
from megatron.core.parameters.param_meta import ParamMeta, set_param_meta


class Norm(nn.Module):
    """A norm over the last dimension of x [..., h], computed by a kernel of its table."""

    kernels: ClassVar[KernelTable[Callable[..., Tensor]]]
    """Functions of (x, parameters in the order of `initial`, eps)."""
    initial: ClassVar[dict[str, float]] = {"weight": 1.0}
    """Initial value of each parameter; "weight" multiplies the normalised activations."""
    added_kernels: ClassVar[KernelTable[AddedNorm] | None] = None
    """Kernels that add a residual first, if there are any."""
    weight: nn.Parameter

    def __init__(
        self,
        hidden_size: int,
        eps: float = 1e-5,
        *,
        sequence_parallel: bool = False,
        zero_centered_gamma: bool = False,
        is_exact: bool = False,
        dtype: torch.dtype | None = None,
        device: torch.device | str | None = None,
    ) -> None:
        super().__init__()
        self.hidden_size = hidden_size
        self.eps = eps
        self.zero_centered_gamma = zero_centered_gamma
        self.sequence_parallel = sequence_parallel
        self.is_exact = is_exact
        # Under sequence parallelism a rank normalises s/tp tokens: its gradient is a partial sum.
        meta = ParamMeta(partial_grad_axes=("tp",) if sequence_parallel else ())
        for name, size in self.sizes(hidden_size).items():
            parameter = nn.Parameter(torch.empty(size, dtype=dtype, device=device))
            self.register_parameter(name, parameter)
            set_param_meta(parameter, meta)
        self.reset_parameters()

    @classmethod
    def sizes(cls, hidden_size: int) -> dict[str, int]:
        """Return the number of elements of each parameter."""
        return dict.fromkeys(cls.initial, hidden_size)

    def reset_parameters(self) -> None:
        """Make the norm a pure normalisation: weight 1 (stored as 0 if zero-centred), bias 0."""
        for name, parameter in self.named_parameters(recurse=False):
            is_centered = self.zero_centered_gamma and name == "weight"
            nn.init.constant_(parameter, self.initial[name] - is_centered)

    def scale(self, weight: Tensor) -> Tensor:
        """Return the factor on the normalised activations, [hidden_size].

        A zero-centred factor is fp32: 1 + weight in bf16 would lose most bits of a small weight.
        """
        return weight.float() + 1.0 if self.zero_centered_gamma else weight

    def forward(
        self, x: Tensor, residual: Tensor | None = None, added_bias: Tensor | None = None
    ) -> Any:
        """Normalise x [..., h]; the result has the dtype and shape of x.

        Args:
            residual: [..., h] of the dtype of x; with it, the result is residual + x + `added_bias`
                and the norm of that sum.
            added_bias: [h] or None.
        """
        parameters = tuple(getattr(self, name) for name in self.initial)
        if residual is None:
            return self.normalize(x, *parameters)
        assert self.added_kernels is not None, type(self)
        return self.added_kernels.choose(self._request(x)).kernel.run(
            lambda total: self.normalize(total, *parameters),
            x, added_bias, residual, (self.scale(self.weight), *parameters[1:]), self.eps,
        )  # fmt: skip

    def adds(self, x: Tensor) -> bool:
        """Whether a kernel computes a sum like x [..., h] and its norm in one pass."""
        if self.added_kernels is None or self.is_exact:
            return False
        return self.added_kernels.choose(self._request(x)).kernel.run is not added_norm_apart

    def _request(self, x: Tensor) -> Request:
        # The weight may be offloaded until the norm is called: only its dtype is read.
        dtype = torch.float32 if self.zero_centered_gamma else self.weight.dtype
        return norm_request(x, dtype, self.training)

    def normalize(self, x: Tensor, weight: Tensor, *others: Tensor) -> Tensor:
        """Normalise x [..., h] with the given parameters, in the order of `initial`."""
        if self.is_exact:
            return exact_norm(x, self.eps, self.scale(weight), (weight, *others))
        weight = self.scale(weight)
        kernel = self.kernels.choose(norm_request(x, weight.dtype, self.training)).kernel
        return kernel.run(x, weight, *others, self.eps)

    def extra_repr(self) -> str:
        """Return size and epsilon."""
        return f"{self.hidden_size}, eps={self.eps:g}"


class LayerNorm(Norm):
    """(x - mean) / sqrt(var + eps) * weight + bias over the last dimension of x [..., h]."""

    kernels = LAYER_NORM
    added_kernels = ADDED_NORM
    initial: ClassVar = {"weight": 1.0, "bias": 0.0}


class LayerNormWithoutBias(Norm):
    """(x - mean) / sqrt(var + eps) * weight over the last dimension of x [..., h]."""

    kernels = LAYER_NORM

    def normalize(self, x: Tensor, weight: Tensor, *others: Tensor) -> Tensor:
        """Normalise x [..., h]."""
        return super().normalize(x, weight, torch.zeros_like(weight))


class RMSNorm(Norm):
    """x / sqrt(mean(x^2) + eps) * weight over the last dimension of x [..., h]."""

    kernels = RMS_NORM
    added_kernels = ADDED_NORM


class RMSNormWithoutWeight(Norm):
    """x / sqrt(mean(x^2) + eps) over the last dimension of x [..., h]."""

    kernels = RMS_NORM
    initial: ClassVar = {}

    def scale(self, weight: Tensor) -> Tensor:
        """Return the factor on the normalised activations, [hidden_size]."""
        return weight

    def normalize(self, x: Tensor, *_parameters: Tensor) -> Tensor:
        """Normalise x [..., h]."""
        return super().normalize(x, torch.ones(x.shape[-1], dtype=x.dtype, device=x.device))


NORMS: dict[str, type[Norm]] = {
    "LayerNorm": LayerNorm,
    "LayerNormWithoutBias": LayerNormWithoutBias,
    "RMSNorm": RMSNorm,
    "RMSNormWithoutWeight": RMSNormWithoutWeight,
}
"""The norms by name: the values of `--normalization`."""
