"""Kernels of the optimizer and of number formats."""

from __future__ import annotations

from megatron.core.kernels.triton_kernels import adam, quantization
from megatron.core.low_precision.formats import E4M3, E5M2
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
    return cases


def _quantization_cases() -> dict[str, KernelCase]:
    outputs = "values_ptr elements_ptr scales_ptr"
    types = arguments("x_ptr", outputs, "rows width x_row blocks")
    transposed = arguments("x_ptr", outputs, "rows width x_column blocks")
    cases = {}
    for name, format in (("E4M3", E4M3), ("E5M2", E5M2)):
        numbers = {"LARGEST": format.largest, "LOWEST": format.lowest_exponent,
                   "MANTISSA": format.mantissa_bits}  # fmt: skip
        of_blocks = numbers | {"HIGHEST": format.highest_exponent, "ROUNDS_UP": True,
                               "num_warps": quantization.NUM_WARPS}  # fmt: skip
        for kind, block in (("MXFP8", 32), ("blocks of 128", 128)):
            rows = {"BLOCK": block, "ROWS": quantization.ELEMENTS // block, "IS_E8M0": block == 32}
            cases[f"{kind}, {name}"] = KernelCase(
                quantization.blocks_kernel, types, of_blocks | rows | {"x_column": 1}, "3 of 3"
            )
            cases[f"{kind}, {name}, transposed"] = KernelCase(
                quantization.blocks_kernel, transposed, of_blocks | rows | {"x_row": 1}, "3 of 3"
            )
        cases[f"one scale, {name}"] = KernelCase(
            quantization.elements_kernel,
            arguments("x_ptr", "scale_ptr out_ptr", "count"),
            {**numbers, "ELEMENTS": quantization.ELEMENTS, "num_warps": quantization.NUM_WARPS},
            "2 of 2",
        )
    return cases


NUMBER_CASES = _adam_cases() | _quantization_cases()
"""Name -> kernel."""
