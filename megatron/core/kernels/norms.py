"""Norms over the last dimension: functions of (x, weight[, bias], eps), and their tables.

x is [..., h], weight and bias are [h]; the result has the shape and dtype of x. The CPU has its own
functions, because torch's have two weaknesses there: the gradient of RMSNorm is a chain of a dozen
passes over the activations, and weight gradients of LayerNorm are accumulated in the dtype of the
activations (in bf16, 1,024 tokens give a relative error of 4 %, 8,192 tokens 10 %).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, TypeAlias

import torch
import torch.nn.functional as F
from torch import Tensor

from megatron.core.foundation.optional_imports import require, why_missing
from megatron.core.kernels import triton_kernels
from megatron.core.kernels.registry import OTHER_DEVICES, Kernel, KernelTable, Request
from megatron.core.parameters.exact_sum import row_sum
from megatron.core.parameters.param_meta import accumulate_main_grad, has_main_grad


def cpu_rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Return x / sqrt(mean(x^2) + eps) * weight over the last dimension of x [..., h].

    weight: [h], of any float dtype.
    """
    if torch.is_grad_enabled():
        return _RMSNorm.apply(x, weight, eps)
    return _rms_normed(x, weight, eps)[0]


def half_layer_norm(x: Tensor, weight: Tensor, bias: Tensor, eps: float) -> Tensor:
    """Return the LayerNorm of x [..., h], of half precision, with sums in fp32.

    weight, bias: [h].
    """
    return _HalfLayerNorm.apply(x, weight, bias, eps)


def _weight_gradient(grad: Tensor, x: Tensor, rstd: Tensor) -> Tensor:
    """Return sum over rows of grad * x * rstd, [h]: a product [1, t] @ [t, h] sums in fp32."""
    product = (grad * x).reshape(-1, x.shape[-1])
    return torch.mm(rstd.reshape(1, -1).to(x.dtype), product).view(-1)


def _rms_normed(x: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """Return the norm of x [..., h] and the factor of each of its rows, [..., 1]."""
    wide = torch.promote_types(x.dtype, torch.float32)
    # A mean adds in pairs. vector_norm would store no squares, but it adds a row in few partial
    # sums: for 4,096 elements in bf16 its rstd has an error of 4.9e-7, this rstd 5e-8.
    out = x.to(wide).square()
    rstd = out.mean(-1, keepdim=True).add_(eps).rsqrt_()
    # One rounding to the activations' dtype, at the end.
    return torch.mul(x, rstd, out=out).mul_(weight).to(x.dtype), rstd


class _RMSNorm(torch.autograd.Function):
    """RMSNorm that keeps only its input and one number a row, with a three-pass gradient.

    With xhat = x * rstd and g = grad * weight, the input gradient of RMSNorm is
    rstd * (g - xhat * mean(g * xhat)); the input gradient of LayerNorm at mean 0 is smaller by
    rstd * mean(g). So torch's fused LayerNorm gradient, called with mean 0, plus this term (one
    matrix-vector product) is the gradient of RMSNorm.
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


class _ExactNorm(torch.autograd.Function):
    """A norm by its formula, with exact sums over rows in the gradients of its parameters.

    Sums over a row are computed by torch row by row, so a rank may hold any of the rows.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, scale: Tensor, eps: float, *owners: Tensor) -> Tensor:
        bias = owners[1] if len(owners) > 1 else None
        wide = x.to(torch.promote_types(x.dtype, torch.float32), copy=True)
        if bias is not None:
            wide.sub_(wide.mean(-1, keepdim=True))
        rstd = wide.square().mean(-1, keepdim=True).add_(eps).rsqrt_()
        ctx.save_for_backward(x, scale, rstd)
        ctx.owners, ctx.is_centered = owners, bias is not None
        out = wide.mul_(rstd).mul_(scale)
        return (out if bias is None else out.add_(bias)).to(x.dtype)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, scale, rstd = ctx.saved_tensors
        normed = x.to(rstd.dtype, copy=True)
        if ctx.is_centered:
            normed.sub_(normed.mean(-1, keepdim=True))
        normed.mul_(rstd)
        grad = grad.to(rstd.dtype)
        columns = x.shape[-1]
        sums = [row_sum((grad * normed).view(-1, columns))]
        if ctx.is_centered:
            sums.append(row_sum(grad.reshape(-1, columns)))
        gradients: list[Tensor | None] = []
        for owner, total in zip(ctx.owners, sums, strict=True):
            if has_main_grad(owner):
                accumulate_main_grad(owner, total)
            gradients.append(None if has_main_grad(owner) else total)
        inner = grad * scale
        correction = normed.mul_((inner * normed).mean(-1, keepdim=True))
        if ctx.is_centered:
            correction.add_(inner.mean(-1, keepdim=True))
        grad_x = inner.sub_(correction).mul_(rstd).to(x.dtype)
        return grad_x, None, None, *gradients


def exact_norm(x: Tensor, eps: float, scale: Tensor, parameters: Sequence[Tensor]) -> Tensor:
    """Return the RMSNorm, or with a bias the LayerNorm, of x [..., h], the same in every layout.

    Args:
        scale: [h], the factor on the normalised activations.
        parameters: weight and, for LayerNorm, bias [h]; they receive the gradients.
    """
    return _ExactNorm.apply(x, scale.detach(), eps, *parameters)


TRAINING = "training"
WEIGHT_DTYPE = "a weight of another dtype"
ALL_NEEDS = frozenset({TRAINING, WEIGHT_DTYPE})
_TRAINING = frozenset({TRAINING})
# Its compiled part: what PyPI calls apex is an unrelated project.
_APEX = partial(why_missing, "fused_layer_norm_cuda")


def torch_rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Return torch's RMSNorm of x [..., h]; the weight [h] is cast to its dtype."""
    return F.rms_norm(x, (x.shape[-1],), weight.to(x.dtype), eps)


def torch_layer_norm(x: Tensor, weight: Tensor, bias: Tensor, eps: float) -> Tensor:
    """Return torch's LayerNorm of x [..., h]; weight and bias [h] are cast to its dtype."""
    return F.layer_norm(x, (x.shape[-1],), weight.to(x.dtype), bias.to(x.dtype), eps)


def apex_rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Return apex's fused RMSNorm of x [..., h] by a weight [h] of its dtype."""
    library = require("apex.normalization.fused_layer_norm", purpose="the norm kernel apex")
    return library.fused_rms_norm_affine(x, weight, (x.shape[-1],), eps)


def apex_layer_norm(x: Tensor, weight: Tensor, bias: Tensor, eps: float) -> Tensor:
    """Return apex's fused LayerNorm of x [..., h] by weight and bias [h] of its dtype."""
    library = require("apex.normalization.fused_layer_norm", purpose="the norm kernel apex")
    return library.fused_layer_norm_affine(x, weight, bias, (x.shape[-1],), eps)


RMS_NORM: KernelTable[Callable[[Tensor, Tensor, float], Tensor]] = KernelTable(
    "RMSNorm",
    {
        "cpu": (
            # Half the time for one row. Not in training: there a recomputed layer must return the
            # same bits with and without gradients.
            Kernel("torch", torch_rms_norm, dtypes=frozenset({"float32"})),
            Kernel("cpu-three-pass", cpu_rms_norm, ALL_NEEDS),
        ),
        OTHER_DEVICES: (
            Kernel("apex", apex_rms_norm, _TRAINING, missing=_APEX, library=True),
            triton_kernels.entry("norms", "rms_norm", ALL_NEEDS),
            Kernel("torch", torch_rms_norm, ALL_NEEDS),
        ),
    },
)

LAYER_NORM: KernelTable[Callable[[Tensor, Tensor, Tensor, float], Tensor]] = KernelTable(
    "LayerNorm",
    {
        "cpu": (
            Kernel(
                "cpu-fp32-sums",
                half_layer_norm,
                ALL_NEEDS,
                dtypes=frozenset({"bfloat16", "float16"}),
            ),
            Kernel("torch", torch_layer_norm, ALL_NEEDS),
        ),
        OTHER_DEVICES: (
            Kernel("apex", apex_layer_norm, _TRAINING, missing=_APEX, library=True),
            triton_kernels.entry("norms", "layer_norm", ALL_NEEDS),
            Kernel("torch", torch_layer_norm, ALL_NEEDS),
        ),
    },
)


NormFunction: TypeAlias = Callable[[Tensor], Tensor]
AddedNorm: TypeAlias = Callable[
    [NormFunction, Tensor, Tensor | None, Tensor, tuple[Tensor, ...], float], tuple[Tensor, Tensor]
]
"""(norm, x [..., h], bias [h] or None, residual [..., h], parameters of the norm, eps) ->
residual + x + bias, and its norm. All tensors have the same dtype."""


def added_norm_apart(
    norm: NormFunction, x: Tensor, bias: Tensor | None, residual: Tensor,
    _parameters: tuple[Tensor, ...], _eps: float,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Add x [..., h] to the residual and norm the sum, one after the other; see `AddedNorm`."""
    total = residual + (x if bias is None else x + bias)
    return total, norm(total)


_APART = Kernel("apart", added_norm_apart, ALL_NEEDS)

ADDED_NORM: KernelTable[AddedNorm] = KernelTable(
    "residual and norm",
    {
        "cpu": (_APART,),
        OTHER_DEVICES: (triton_kernels.entry("norms", "added_norm", ALL_NEEDS), _APART),
    },
)


def norm_request(x: Tensor, weight_dtype: torch.dtype, training: bool) -> Request:
    """Return the request for a norm of x [..., h] with a weight of a dtype."""
    needs = set()
    if training or torch.is_grad_enabled():
        needs.add(TRAINING)
    if weight_dtype != x.dtype:
        needs.add(WEIGHT_DTYPE)
    return Request.of(x, needs)
