"""The compiled part of Transformer Engine, in plain torch.

`install()` puts it where the library looks for it; then the library's own Python, as it is
published, computes on the CPU. Only what its layers call in fp32, bf16 and fp16 is here; anything
else raises `NotImplementedError` with its name. Run it in a process of its own: it changes torch.
"""

import enum
import functools
import importlib.machinery
import os
import sys
import types
from typing import Any
from unittest import mock

import torch
from torch import Tensor

from tests.gpu_without_gpu.cuda_calls import compute_cuda_calls_on_host

NAME = "transformer_engine_torch"


class DType(enum.IntEnum):
    """The library's names of element types."""

    kByte = 0
    kInt32 = 2
    kFloat32 = 4
    kFloat16 = 5
    kBFloat16 = 6
    kFloat8E4M3 = 7
    kFloat8E5M2 = 8
    kFloat4E2M1 = 10


_TORCH_DTYPES = {
    DType.kByte: torch.uint8,
    DType.kInt32: torch.int32,
    DType.kFloat32: torch.float32,
    DType.kFloat16: torch.float16,
    DType.kBFloat16: torch.bfloat16,
}
_POSITIONS = {
    "FP8FwdTensors": [f"GEMM{i}_{x}" for i in (1, 2, 3) for x in ("INPUT", "WEIGHT", "OUTPUT")],
    "FP8BwdTensors": [f"GRAD_{x}{i}" for i in (1, 2, 3) for x in ("OUTPUT", "INPUT")],
}


class _Member(int):
    """A value of an enumeration whose names are made when they are asked for."""


class _Enumeration(type):
    @property
    def __members__(cls) -> dict[str, _Member]:
        return {name: value for name, value in vars(cls).items() if isinstance(value, _Member)}

    def __getattr__(cls, name: str) -> _Member:
        if name.startswith("__"):
            raise AttributeError(name)
        known = _POSITIONS.get(cls.__name__)
        value = _Member(known.index(name) if known else len(cls.__members__))
        setattr(cls, name, value)
        return value


def _dtype_of(code: Any, otherwise: torch.dtype) -> torch.dtype:
    return otherwise if code is None else _TORCH_DTYPES[DType(int(code))]


def generic_gemm(
    a: Tensor,
    transposes_a: bool,
    b: Tensor,
    transposes_b: bool,
    out: Tensor | None,
    quantizer: object,
    out_dtype: Any,
    bias: Tensor | None,
    bias_dtype: Any,
    gelu: bool,
    gelu_input: Tensor | None,
    grad: bool,
    workspace: Tensor,
    workspace_size: int,
    accumulate: bool,
    use_split_accumulator: bool,
    *,
    comm_overlap: object = None,
    comm_type: object = None,
    extra_output: Tensor | None = None,
    bulk_overlap: bool = False,
    alpha: float = 1.0,
    beta: float | None = None,
) -> tuple[Tensor, Tensor | None, None, Tensor | None]:
    """Return (op(b) op(a), gradient of the bias, None, None), in the order of cuBLAS."""
    if quantizer is not None or gelu or comm_overlap is not None:
        raise NotImplementedError("products of quantized operands, with GELU or communication")
    left, right = b.reshape(-1, b.shape[-1]), a.reshape(-1, a.shape[-1])
    product = (left.t() if transposes_b else left).float() @ (
        right.t() if transposes_a else right
    ).float()
    product *= alpha
    bias_grad = None
    if bias is not None and grad:
        bias_grad = left.float().sum(0).to(bias.dtype)
    elif bias is not None:
        product = product + bias.float()
    if out is not None:
        out.add_(product.to(out.dtype)) if accumulate else out.copy_(product)
        return out, bias_grad, None, extra_output
    result = product.to(_dtype_of(out_dtype, a.dtype))
    if not transposes_b:
        result = result.reshape(*b.shape[:-1], product.shape[-1])
    return result, bias_grad, None, extra_output


def te_general_grouped_gemm(
    a: list[Tensor],
    transposes_a: bool,
    b: list[Tensor],
    transposes_b: bool,
    out: list[Tensor],
    out_dtype: Any,
    sizes: list[int],
    bias: list[Tensor],
    bias_dtype: Any,
    single_output: bool,
    pre_gelu: list[Tensor],
    grad: bool,
    workspaces: Any,
    workspace_size: int,
    accumulate: bool,
    use_split_accumulator: bool,
    num_processors: int,
) -> list[Tensor]:
    """Compute a product for each group into `out`; return the gradients of the biases."""
    outputs = list(out[0].split(sizes)) if single_output else out
    for i, (left, right, result) in enumerate(zip(b, a, outputs, strict=True)):
        has_bias = bool(bias) and bias[i].numel() > 0
        _, bias_grad, _, _ = generic_gemm(
            right, transposes_a, left, transposes_b, None if left.numel() == 0 else result, None,
            None, bias[i] if has_bias else None, bias_dtype, False, None, grad, left, 0,
            accumulate, use_split_accumulator,
        )  # fmt: skip
        if left.numel() == 0 and transposes_b and not accumulate:
            result.zero_()
        if bias_grad is not None:
            bias[i].copy_(bias_grad)
    return bias


def rmsnorm_fwd(
    x: Tensor, weight: Tensor, eps: float, out: Tensor | None, quantizer: object, out_dtype: Any,
    margin: int, zero_centered: bool,
) -> tuple[Tensor, None, Tensor]:  # fmt: skip
    """Return (norm of x, None, 1 / root mean square)."""
    wide = x.float()
    inverse = (wide.pow(2).mean(-1) + eps).rsqrt()
    y = wide * inverse[..., None] * (weight.float() + zero_centered)
    return y.to(_dtype_of(out_dtype, x.dtype)), None, inverse


def rmsnorm_bwd(
    dy: Tensor, x: Tensor, inverse: Tensor, weight: Tensor, margin: int, zero_centered: bool
) -> tuple[Tensor, Tensor]:
    """Return the gradients of x and of the weight."""
    wide, g = x.float(), dy.float()
    normed = wide * inverse[..., None]
    scaled = g * (weight.float() + zero_centered)
    dx = inverse[..., None] * (scaled - normed * (scaled * normed).mean(-1, keepdim=True))
    dw = (g * normed).reshape(-1, x.shape[-1]).sum(0)
    return dx.to(x.dtype), dw.to(weight.dtype)


def layernorm_fwd(
    x: Tensor, weight: Tensor, bias: Tensor, eps: float, out: Tensor | None, quantizer: object,
    out_dtype: Any, margin: int, zero_centered: bool,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """Return (norm of x, mean, 1 / standard deviation)."""
    wide = x.float()
    mean = wide.mean(-1)
    inverse = (wide.var(-1, unbiased=False) + eps).rsqrt()
    normed = (wide - mean[..., None]) * inverse[..., None]
    y = normed * (weight.float() + zero_centered) + bias.float()
    return y.to(_dtype_of(out_dtype, x.dtype)), mean, inverse


def layernorm_bwd(
    dy: Tensor, x: Tensor, mean: Tensor, inverse: Tensor, weight: Tensor, margin: int,
    zero_centered: bool,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """Return the gradients of x, of the weight and of the bias."""
    g = dy.float()
    normed = (x.float() - mean[..., None]) * inverse[..., None]
    scaled = g * (weight.float() + zero_centered)
    centred = scaled - scaled.mean(-1, keepdim=True)
    dx = inverse[..., None] * (centred - normed * (scaled * normed).mean(-1, keepdim=True))
    rows = (-1, x.shape[-1])
    dw, db = (g * normed).reshape(rows).sum(0), g.reshape(rows).sum(0)
    return dx.to(x.dtype), dw.to(weight.dtype), db.to(weight.dtype)


def _absent(name: str) -> Any:
    """Make what the library looks up: an enumeration, or a function that says it is not here."""
    if name.startswith("__"):
        raise AttributeError(name)
    if name[0].isupper():
        return _Enumeration(name, (), {})

    def not_here(*_: object, **__: object) -> None:
        raise NotImplementedError(f"{NAME}.{name} has no stand-in on the CPU")

    return not_here


class _Extension(types.ModuleType):
    def __getattr__(self, name: str) -> Any:
        value = _absent(name)
        setattr(self, name, value)
        return value


@functools.cache
def install() -> None:
    """Stand in for the compiled part, and for CUDA; call it before the library is imported."""
    compute_cuda_calls_on_host()
    os.environ |= {
        "NVTE_PROJECT_BUILDING": "1",  # no search for shared libraries
        "NVTE_TORCH_COMPILE": "0",
        "NVTE_FLASH_ATTN": "0",
        "NVTE_FUSED_ATTN": "0",
        "NVTE_UNFUSED_ATTN": "1",
    }
    extension = _Extension(NAME)
    computed = (
        generic_gemm, te_general_grouped_gemm, rmsnorm_fwd, rmsnorm_bwd, layernorm_fwd,
        layernorm_bwd,
    )  # fmt: skip
    for function in computed:
        setattr(extension, function.__name__, function)
    extension.DType = DType
    extension.get_cublasLt_version = lambda: 130000
    extension.get_cudnn_version = lambda: 92100
    extension.get_num_cublas_streams = lambda: 4
    sys.modules[NAME] = extension
    for name in ("onnx", "onnxscript", "onnxscript.ir"):  # for its export, which nobody calls
        module = mock.MagicMock()
        module.__spec__ = importlib.machinery.ModuleSpec(name, None)
        sys.modules.setdefault(name, module)
    import transformer_engine.common as common

    common.load_framework_extension = lambda *_: None
    common.check_cudnn_version = lambda *_: None
    import transformer_engine.pytorch as library

    workspace = torch.empty(1, dtype=torch.uint8)
    for name, module in list(sys.modules.items()):
        if name.startswith(library.__name__) and hasattr(module, "get_cublas_workspace"):
            module.get_cublas_workspace = lambda _, __, grouped: (
                [workspace] * 4 if grouped else workspace
            )
