"""Flash attention, forward and backward, with dropout and documents and without."""

from __future__ import annotations

from itertools import product

from megatron.core.kernels.triton_kernels import attention
from tests.gpu_without_gpu.triton_kernels.kernel_case import KernelCase, arguments


def _attention_cases() -> dict[str, KernelCase]:
    strides = " ".join(f"{x}_{axis}" for x in ("q", "k", "v", "out") for axis in "sbn")
    sizes = " heads heads_per_group length key_width value_width left right first_head"
    others = {"seed": "i64", "first_sample": "i64", "threshold": "i64", "ids_ptr": "*i32"}
    inputs, numbers = "q_ptr k_ptr v_ptr", "lse_ptr delta_ptr"
    keys = arguments(
        f"{inputs} grad_ptr grad_k_ptr grad_v_ptr", numbers, strides + sizes, "scale factor slope"
    )
    queries = arguments(
        f"{inputs} grad_ptr grad_q_ptr", numbers, strides + sizes, "scale factor slope"
    )
    forward = arguments(f"{inputs} out_ptr", "lse_ptr", strides + sizes, "scale factor")
    cases = {}
    for width, drops, has_ids in product((128, 64), (True, False), (True, False)):
        of_keys = attention.BACKWARD_OF_KEYS[width]
        of_queries = attention.BACKWARD_OF_QUERIES[width]
        kernels = {
            "forward": (attention.forward_kernel, forward, attention.FORWARD, "4 of 4"),
            "of keys": (attention.backward_keys_kernel, keys, of_keys, "6 of 6"),
            "of queries": (attention.backward_queries_kernel, queries, of_queries, "5 of 1"),
        }
        for name, (kernel, types, launch, moved) in kernels.items():
            constants = {"HAS_IDS": has_ids, "DROPS": drops, "D": width, "E": width, **launch}
            beside = ["dropout"] * drops + ["documents"] * has_ids
            cases[", ".join((f"attention {width}", *beside, name))] = KernelCase(
                kernel, types | others, constants, moved
            )
    return cases


ATTENTION_CASES = _attention_cases()
"""Name -> kernel."""
