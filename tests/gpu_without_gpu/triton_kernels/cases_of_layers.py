"""Kernels of norms, activations, dropout, losses and rotary embedding, at sizes of models."""

from itertools import product

import triton

from megatron.core.kernels.triton_kernels import (
    bias_dropout,
    gated_activation,
    norms,
    permutation,
    rotary,
    vocab_softmax,
)
from tests.gpu_without_gpu.triton_kernels.kernel_case import KernelCase, arguments


def _norm_cases() -> dict[str, KernelCase]:
    cases = {}
    forward = arguments(
        "x_ptr residual_ptr added_ptr weight_ptr bias_ptr sum_ptr out_ptr", "mean_ptr rstd_ptr",
        "width", "eps",
    )  # fmt: skip
    backward = arguments(
        "x_ptr grad_ptr grad_sum_ptr weight_ptr grad_x_ptr",
        "mean_ptr rstd_ptr weight_sums_ptr bias_sums_ptr",
        "num_rows width",
    )
    sums = arguments(
        "x_ptr grad_ptr",
        "mean_ptr rstd_ptr weight_sums_ptr bias_sums_ptr",
        "num_rows width rows_per_program",
    )
    sizes = ((False, 4096), (False, norms.WIDEST), (True, 4096), (True, norms.WIDEST_ADDED))
    for (name, centers), (adds, width) in product((("RMSNorm", False), ("LayerNorm", True)), sizes):
        beside = ", residual" if adds else ""
        both = {"CENTERS": centers, "ADDS": adds, **norms.launch_of(width)}
        cases[f"{name} {width}{beside}, forward"] = KernelCase(
            norms.forward_kernel,
            forward,
            {"HAS_ADDED_BIAS": adds, **both},
            "4 of 4" if adds else "2 of 2",
        )
        cases[f"{name} {width}{beside}, backward"] = KernelCase(
            norms.backward_kernel,
            backward,
            {"SUMS": width <= norms.WIDEST_FUSED, **both, **norms.backward_launch_of(width, adds)},
            "4 of 4" if adds else "3 of 3",
        )
        if width > norms.WIDEST_FUSED and not adds:
            tile = {"ROWS": norms.SUM_ROWS, "COLUMNS": norms.SUM_COLUMNS, "num_warps": 4}
            cases[f"{name} {width}, sums"] = KernelCase(
                norms.sums_kernel, sums, {"CENTERS": centers, **tile}, "2 of 0"
            )
    return cases


def _gated_cases() -> dict[str, KernelCase]:
    constants = {
        "HAS_BIAS": True,
        "HAS_WEIGHTS": True,
        "COLUMNS": gated_activation.COLUMNS,
        "num_warps": gated_activation.NUM_WARPS,
    }
    cases = {}
    for name, kind in (("SwiGLU", 0), ("GeGLU", 2)):
        cases[f"{name} forward"] = KernelCase(
            gated_activation.forward_kernel,
            arguments("packed_ptr bias_ptr out_ptr", "weights_ptr", "width"),
            {"KIND": kind, **constants},
            "3 of 3",
        )
        cases[f"{name} backward"] = KernelCase(
            gated_activation.backward_kernel,
            arguments(
                "packed_ptr bias_ptr grad_ptr grad_packed_ptr",
                "weights_ptr weight_sums_ptr",
                "width",
            ),
            {"KIND": kind, **constants},
            "5 of 5",
        )
    return cases


def _dropout_cases() -> dict[str, KernelCase]:
    types = arguments("x_ptr bias_ptr residual_ptr out_ptr", "", "width batch", "scale")
    types |= {"positions_ptr": "*i32", "seed": "i64", "first_sample": "i64", "threshold": "i64"}
    return {
        f"bias, dropout, residual {name}": KernelCase(
            bias_dropout.dropout_kernel,
            types,
            {
                "HAS_BIAS": forward,
                "HAS_RESIDUAL": forward,
                "COLUMNS": bias_dropout.COLUMNS,
                "num_warps": bias_dropout.NUM_WARPS,
            },
            "3 of 3" if forward else "2 of 2",
        )
        for name, forward in (("forward", True), ("backward", False))
    }


def _vocab_cases() -> dict[str, KernelCase]:
    constants = {"COLUMNS": vocab_softmax.COLUMNS, "num_warps": vocab_softmax.NUM_WARPS}
    numbers = "highest_ptr log_sum_ptr"
    labels = {"label_ptr": "*i64", "is_local_ptr": "*i1"}
    return {
        "vocabulary, denominators": KernelCase(
            vocab_softmax.statistics_kernel,
            arguments("logits_ptr", f"{numbers} label_logit_ptr sums_ptr", "width valid stride")
            | labels,
            {"HAS_SUMS": True, **constants},
            "1 of 1",
        ),
        "vocabulary, gradient": KernelCase(
            vocab_softmax.gradient_kernel,
            arguments(
                "logits_ptr out_ptr",
                f"{numbers} scale_ptr",
                "width valid stride out_stride",
                "on_label uniform",
            )
            | labels,
            {"HAS_SCALE": True, **constants},
            "2 of 2",
        ),
    }


def _rotary_cases() -> dict[str, KernelCase]:
    """Llama's heads, a quarter of NeoX's, and DeepSeek's latent attention."""
    warps = {"num_warps": rotary.NUM_WARPS}
    sizes = "batch heads width pairs cos_s cos_b "
    types = arguments(
        "x_ptr cos_ptr sin_ptr out_ptr", "",
        sizes + "x_s x_b x_group x_n heads_per_group first", "direction",
    )  # fmt: skip
    cases = {}
    for name, width, pairs, interleaved in (
        ("rotary 128", 128, 64, False),
        ("rotary 128, adjacent", 128, 64, True),
        ("rotary 24 of 96", 96, 12, False),
        ("rotary 64 of 192, adjacent", 192, 32, True),
    ):
        rest = triton.next_power_of_2(width - 2 * pairs) if width > 2 * pairs else 0
        constants = {
            "INTERLEAVED": interleaved,
            "HEADS": rotary.heads_of_program(32, width),
            "PAIRS": triton.next_power_of_2(pairs),
            "REST": rest,
        }
        cases[name] = KernelCase(rotary.rotation_kernel, types, constants | warps, "2 of 2")
    return cases


def _permutation_cases() -> dict[str, KernelCase]:
    constants = {"COLUMNS": permutation.COLUMNS, "num_warps": permutation.NUM_WARPS}
    rows = arguments("x_ptr out_ptr", "", "width")
    source = {"source_ptr": "*i64"}
    return {
        "rows to experts": KernelCase(
            permutation.gather_kernel, rows | source, constants, "2 of 2"
        ),
        "sums of rows": KernelCase(
            permutation.sum_kernel,
            rows | {"order_ptr": "*i64", "begins_ptr": "*i64"},
            constants,
            "2 of 2",
        ),
    }


LAYER_CASES = (
    _norm_cases()
    | _gated_cases()
    | _dropout_cases()
    | _vocab_cases()
    | _rotary_cases()
    | _permutation_cases()
)
"""Name -> kernel."""
