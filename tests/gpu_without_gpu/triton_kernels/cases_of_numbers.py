"""Kernels of the optimizer and of number formats."""

import torch

from megatron.core.kernels.triton_kernels import adam, quantization, squares
from tests.gpu_without_gpu.triton_kernels.kernel_case import KernelCase, arguments


def _adam_cases() -> dict[str, KernelCase]:
    numbers = "factor lr beta2 share1 share2 eps decay correction1 correction2"
    kinds = {
        "fp32": (adam.FP32, adam.FP32, adam.FP32, False),
        "bf16, remainders": (adam.BF16, adam.BF16, adam.REMAINDER, True),
        "fp16, fp16 weights": (adam.FP16, adam.FP16, adam.FP16, True),
        "fp8, remainders": (adam.FP8, adam.FP8, adam.REMAINDER, True),
    }
    cases = {}
    for name, (first, second, main, has_main) in kinds.items():
        types = arguments("", "grad_ptr", "numel first_place", numbers)
        types |= dict.fromkeys(("first_ptr", "second_ptr", "main_ptr"), "*u8")
        types |= {"step_bits": "i64", "weight_ptr": "*bf16" if has_main else "*fp32"}
        constants = {"FIRST": first, "SECOND": second, "MAIN": main, "HAS_MAIN": has_main,
                     "DECOUPLES": True, "MAIN_SHIFT": 6, "num_warps": adam.NUM_WARPS}  # fmt: skip
        moved = "9 of 9" if has_main else "7 of 7"
        cases[f"Adam, {name}"] = KernelCase(adam.adam_kernel, types, constants, moved)
    numbers = "lr beta2 share1 share2 eps decay log_beta1 log_beta2"
    for name, has_weight in (("fp32 in one pass", False), ("fp32 in one pass, bf16 weights", True)):
        floats = "grad_ptr main_ptr first_ptr second_ptr step_ptr scale_ptr refused_ptr"
        half, floats = ("weight_ptr", floats) if has_weight else ("", f"{floats} weight_ptr")
        types = arguments(half, floats, "numel", numbers)
        constants = {"HAS_WEIGHT": has_weight, "HAS_SCALE": True, "DECOUPLES": True,
                     "ELEMENTS": adam.ELEMENTS, "num_warps": adam.FP32_WARPS}  # fmt: skip
        moved = "8 of 8" if has_weight else "7 of 7"
        cases[f"Adam, {name}"] = KernelCase(adam.fp32_kernel, types, constants, moved)
    return cases


def _quantization_cases() -> dict[str, KernelCase]:
    return {
        f"FP8 cast, {name}": KernelCase(
            quantization.scaled_cast_kernel,
            arguments("x_ptr", "scale_ptr", "count") | {"out_ptr": "*u8"},
            {"LARGEST": torch.finfo(format).max, "LOWEST": lowest, "MANTISSA": mantissa,
             "ELEMENTS": quantization.ELEMENTS, "num_warps": quantization.NUM_WARPS},
            "2 of 2",
        )
        for name, format, lowest, mantissa in (
            ("E4M3", torch.float8_e4m3fn, -6, 3), ("E5M2", torch.float8_e5m2, -14, 2)
        )
    }  # fmt: skip


def _square_cases() -> dict[str, KernelCase]:
    types = {"begins_ptr": "*i64", "out_ptr": "*fp64"}
    constants = {"BLOCKS": 64, "num_warps": squares.NUM_WARPS}
    return {
        f"squares of the gradient, {name}": KernelCase(
            squares.squares_kernel, types | {"x_ptr": pointer}, constants, "1 of 1"
        )
        for name, pointer in (("fp32", "*fp32"), ("bf16", "*bf16"))
    }


NUMBER_CASES = _adam_cases() | _quantization_cases() | _square_cases()
"""Name -> kernel."""
