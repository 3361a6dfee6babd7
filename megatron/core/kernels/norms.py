"""The tables of norms over the last dimension: functions of (x, weight[, bias], eps).

x is [..., h], weight and bias are [h]; the result has the shape and dtype of x.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import TypeAlias

import torch
import torch.nn.functional as F
from torch import Tensor

from megatron.core.foundation.optional_imports import require, why_missing
from megatron.core.kernels import triton_kernels
from megatron.core.kernels.cpu.norms import cpu_rms_norm, half_layer_norm
from megatron.core.kernels.registry import OTHER_DEVICES, Kernel, KernelTable, Request

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
            # Half the time for a row. Not in training: a layer that is computed again there must
            # give the same bits with and without gradients.
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
residual + x + bias, and the norm of it. All dtypes are one."""


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
    """Return what the norm of x [..., h] by a weight of a dtype needs."""
    needs = set()
    if training or torch.is_grad_enabled():
        needs.add(TRAINING)
    if weight_dtype != x.dtype:
        needs.add(WEIGHT_DTYPE)
    return Request.of(x, needs)
