"""Flash attention, forward and backward, with dropout, documents and soft-capping and without."""

from __future__ import annotations

from itertools import product

from megatron.core.kernels.triton_kernels import attention
from tests.gpu_without_gpu.triton_kernels.kernel_case import KernelCase, arguments

NAMES = ("dropout", "documents", "soft-capping")
KINDS = (NAMES, NAMES[:2], NAMES[:1], NAMES[1:2], ())
LISTED = (NAMES, ())


def _attention_cases() -> dict[str, KernelCase]:
    strides = " ".join(f"{x}_{axis}" for x in ("q", "k", "v", "out") for axis in "sbn")
    sizes = " heads heads_per_group length key_width value_width left right first_head"
    others = {"seed": "i64", "first_sample": "i64", "threshold": "i64", "ids_ptr": "*i32"}
    inputs, numbers = "q_ptr k_ptr v_ptr", "lse_ptr delta_ptr"
    keys = arguments(
        f"{inputs} grad_ptr grad_k_ptr grad_v_ptr",
        numbers,
        strides + sizes,
        "scale cap factor slope",
    )
    queries = arguments(
        f"{inputs} grad_ptr grad_q_ptr", numbers, strides + sizes, "scale cap factor slope"
    )
    forward = arguments(f"{inputs} out_ptr", "lse_ptr", strides + sizes, "scale cap factor")
    cases = {}
    for tiles, kind in product(reversed(attention.TILES), KINDS):
        widths = tiles.key_width, tiles.value_width
        kernels = {
            "forward": (attention.forward_kernel, forward, tiles.forward, "4 of 4"),
            "of keys": (attention.backward_keys_kernel, keys, tiles.of_keys, "6 of 6"),
            "of queries": (attention.backward_queries_kernel, queries, tiles.of_queries, "5 of 1"),
        }
        flags = dict(
            zip(("DROPS", "HAS_IDS", "CAPS"), (name in kind for name in NAMES), strict=True)
        )
        for name, (kernel, types, launch, moved) in kernels.items():
            constants = {**flags, **attention.widths_of(*widths), **launch}
            label = " and ".join(str(width) for width in sorted({*widths}, reverse=True))
            cases[", ".join((f"attention {label}", *kind, name))] = KernelCase(
                kernel, types | others, constants, moved, is_listed=kind in LISTED
            )
    return cases


ATTENTION_CASES = _attention_cases()
"""Name -> kernel."""
