"""LayerNorm and RMSNorm.

LayerNorm: J. L. Ba, J. R. Kiros, G. E. Hinton, "Layer Normalization", arXiv 1607.06450.
RMSNorm: B. Zhang, R. Sennrich, "Root Mean Square Layer Normalization", arXiv 1910.07467.

On accelerators the kernels behind `torch.nn.functional` are used. On the CPU they have two
weaknesses, which the functions below remove: the gradient of RMSNorm is a chain of a dozen passes
over the activations, and the weight gradients of LayerNorm are accumulated in the dtype of the
activations (in bf16, 1,024 rows give a relative error of 4 %, 8,192 rows 10 %).
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from megatron.core.param_meta import ParamMeta, set_param_meta


class _RowNorm(nn.Module):
    """What both norms share: a weight over the last dimension, and its facts."""

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

    def _attach_facts(self) -> None:
        # Under sequence parallelism a rank normalises s/tp rows: its gradient is a partial sum.
        axes = ("tp",) if self.sequence_parallel else ()
        for parameter in self.parameters(recurse=False):
            set_param_meta(parameter, ParamMeta(grad_sum_axes=axes))

    def scale(self) -> Tensor:
        """Return the factor on the normalised activations, [hidden_size].

        A zero-centred one is formed in fp32: 1 + weight in bf16 would lose most of a small weight.
        """
        return self.weight.float() + 1.0 if self.zero_centered_gamma else self.weight

    def parameters_like(self, x: Tensor) -> list[Tensor]:
        """Return factor and bias in the dtype of x (a residual stream may be kept in fp32)."""
        bias = getattr(self, "bias", None)
        return [t.to(x.dtype) for t in (self.scale(), bias) if t is not None]

    def extra_repr(self) -> str:
        """Return size and epsilon."""
        return f"{self.hidden_size}, eps={self.eps:g}"


class LayerNorm(_RowNorm):
    """(x - mean) / sqrt(var + eps) * weight + bias over the last dimension of x [..., h]."""

    def __init__(self, hidden_size: int, eps: float = 1e-5, **options: Any) -> None:
        super().__init__(hidden_size, eps, **options)
        self.bias = nn.Parameter(torch.empty_like(self.weight))
        self.reset_parameters()
        self._attach_facts()

    def reset_parameters(self) -> None:
        """Make the norm a pure normalisation."""
        super().reset_parameters()
        nn.init.zeros_(self.bias)

    def forward(self, x: Tensor) -> Tensor:
        """Normalise x [..., h]; the result has the dtype and shape of x."""
        if x.device.type == "cpu" and x.dtype in (torch.bfloat16, torch.float16):
            return _HalfLayerNorm.apply(x, self.scale(), self.bias, self.eps)
        weight, bias = self.parameters_like(x)
        return F.layer_norm(x, (self.hidden_size,), weight, bias, self.eps)


class RMSNorm(_RowNorm):
    """x / sqrt(mean(x^2) + eps) * weight over the last dimension of x [..., h]."""

    def __init__(self, hidden_size: int, eps: float = 1e-5, **options: Any) -> None:
        super().__init__(hidden_size, eps, **options)
        self.reset_parameters()
        self._attach_facts()

    def forward(self, x: Tensor) -> Tensor:
        """Normalise x [..., h]; the result has the dtype and shape of x."""
        if x.device.type == "cpu":
            if not torch.is_grad_enabled():
                weight = self.scale()
                if not self.training and x.dtype == weight.dtype == torch.float32:
                    # Half the time for a row. Not in training: a layer that is computed again
                    # there must give the same bits with and without gradients.
                    return F.rms_norm(x, (self.hidden_size,), weight, self.eps)
                return _rms_normed(x, weight, self.eps)[0]
            return _RMSNormFunction.apply(x, self.scale(), self.eps)
        (weight,) = self.parameters_like(x)
        return F.rms_norm(x, (self.hidden_size,), weight, self.eps)


def _weight_gradient(grad: Tensor, x: Tensor, rstd: Tensor) -> Tensor:
    """Return sum over rows of grad * x * rstd, [h]: a product [1, t] @ [t, h] sums in fp32."""
    product = (grad * x).reshape(-1, x.shape[-1])
    return torch.mm(rstd.reshape(1, -1).to(x.dtype), product).view(-1)


def _rms_normed(x: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """Return the norm of x [..., h] and what its rows were multiplied by, [..., 1]."""
    wide = torch.promote_types(x.dtype, torch.float32)
    norm = torch.linalg.vector_norm(x, dim=-1, keepdim=True, dtype=wide)
    rstd = norm.square_().div_(x.shape[-1]).add_(eps).rsqrt_()
    # One rounding to the activations' dtype, at the end.
    return x.to(wide).mul(rstd).mul_(weight).to(x.dtype), rstd


class _RMSNormFunction(torch.autograd.Function):
    """RMSNorm that keeps only its input and one number a row, with a three-pass gradient.

    With xhat = x * rstd and g = grad * weight, the input gradient of RMSNorm is
    rstd * (g - xhat * mean(g * xhat)); that of LayerNorm at mean 0 is the same minus
    rstd * mean(g). So torch's fused LayerNorm gradient, called with mean 0, plus that last term
    (one matrix-vector product) is the gradient of RMSNorm.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        out, rstd = _rms_normed(x, weight, eps)
        ctx.save_for_backward(x, weight, rstd)
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, Tensor | None, None]:
        x, weight, rstd = ctx.saved_tensors
        grad = grad.contiguous()
        size = x.shape[-1]
        grad_x = grad_weight = None
        if ctx.needs_input_grad[0]:
            grad_x = torch.ops.aten.native_layer_norm_backward(
                grad, x, [size], torch.zeros_like(rstd), rstd, weight.to(rstd.dtype), None,
                [True, False, False],
            )[0]  # fmt: skip
            mean = torch.mv(grad.view(-1, size), weight.to(grad.dtype)).view(rstd.shape)
            grad_x.add_(mean.mul_(rstd / size))
        if ctx.needs_input_grad[1]:
            grad_weight = _weight_gradient(grad, x, rstd).to(weight.dtype)
        return grad_x, grad_weight, None


class _HalfLayerNorm(torch.autograd.Function):
    """LayerNorm of half-precision activations with statistics and parameter gradients in fp32."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor, eps: float) -> Tensor:
        out, mean, rstd = torch.native_layer_norm(
            x, [x.shape[-1]], weight.float(), bias.float(), eps
        )
        ctx.save_for_backward(x, weight, mean, rstd)
        ctx.bias_dtype = bias.dtype
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, Tensor, Tensor, None]:
        x, weight, mean, rstd = ctx.saved_tensors
        grad = grad.contiguous()
        size = x.shape[-1]
        grad_x = None
        if ctx.needs_input_grad[0]:
            grad_x = torch.ops.aten.native_layer_norm_backward(
                grad, x, [size], mean, rstd, weight.float(), None, [True, False, False]
            )[0]
        centred = x - mean.to(x.dtype)
        grad_weight = _weight_gradient(grad, centred, rstd).to(weight.dtype)
        grad_bias = grad.view(-1, size).sum(0).to(ctx.bias_dtype)
        return grad_x, grad_weight, grad_bias, None
