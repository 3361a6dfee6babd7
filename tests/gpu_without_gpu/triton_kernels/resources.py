"""Compile each kernel ahead of time for four generations of GPUs, and count what it takes.

    python -m tests.gpu_without_gpu.triton_kernels.resources     # the table of docs/kernels.md

Registers, stack and local memory (where registers spill to) and shared memory are those of the
compiled program, as NVIDIA's `cuobjdump` reads them.
"""

from __future__ import annotations

import functools
import re
import subprocess
import tempfile
from dataclasses import dataclass, field
from itertools import product
from pathlib import Path
from typing import Any

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from megatron.core.kernels.triton_kernels import (
    attention,
    bias_dropout,
    gated_activation,
    norms,
    vocab_softmax,
)

TOOLS = Path(triton.__file__).parent / "backends" / "nvidia" / "bin"
SHARED_LIMIT = {
    "sm_80": 163 * 1024,
    "sm_90a": 227 * 1024,
    "sm_100a": 227 * 1024,
    "sm_120": 99 * 1024,
}
"""Target -> bytes of shared memory that a block may have (CUDA C++ Programming Guide, table of
compute capabilities)."""


@dataclass(frozen=True)
class KernelCase:
    """One kernel at one size.

    Attributes:
        kernel: the function under `triton.jit`.
        arguments: types of all run-time arguments by name.
        constants: values of the others, and `num_warps`, `num_stages`.
        bytes_moved: what it reads and writes of the tensors, in units of one of them, and the
            least that could be: "5 of 5".
    """

    kernel: Any
    arguments: dict[str, str]
    constants: dict[str, Any] = field(default_factory=dict)
    bytes_moved: str = ""


@dataclass(frozen=True)
class Resources:
    """What a compiled kernel takes."""

    registers: int
    spilled_bytes: int
    """Per thread: stack and local memory."""
    shared_bytes: int
    has_tensor_cores: bool


def arguments(half: str = "", floats: str = "", ints: str = "", reals: str = "") -> dict[str, str]:
    """Return types by name: pointers to bf16, pointers to fp32, integers, fp32 numbers."""
    kinds = {"*bf16": half, "*fp32": floats, "i32": ints, "fp32": reals}
    return {name: kind for kind, names in kinds.items() for name in names.split()}


def _norm_cases() -> dict[str, KernelCase]:
    cases = {}
    forward = arguments("x_ptr weight_ptr bias_ptr out_ptr", "mean_ptr rstd_ptr", "width", "eps")
    backward = arguments(
        "x_ptr grad_ptr weight_ptr grad_x_ptr",
        "mean_ptr rstd_ptr weight_sums_ptr bias_sums_ptr",
        "num_rows width",
    )
    sums = arguments(
        "x_ptr grad_ptr",
        "mean_ptr rstd_ptr weight_sums_ptr bias_sums_ptr",
        "num_rows width rows_per_program",
    )
    for name, centers in (("RMSNorm", False), ("LayerNorm", True)):
        for width in (4096, 16384):
            launch, fused = norms.launch_of(width), width <= norms.WIDEST_FUSED
            cases[f"{name} {width} forward"] = KernelCase(
                norms.forward_kernel, forward, {"CENTERS": centers, **launch}, "2 of 2"
            )
            cases[f"{name} {width} backward"] = KernelCase(
                norms.backward_kernel,
                backward,
                {"CENTERS": centers, "SUMS": fused, **launch},
                "3 of 3",
            )
        cases[f"{name} 16384 sums"] = KernelCase(
            norms.sums_kernel,
            sums,
            {
                "CENTERS": centers,
                "ROWS": norms.SUM_ROWS,
                "COLUMNS": norms.SUM_COLUMNS,
                "num_warps": 4,
            },
            "2 of 0",
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
    return {
        "vocabulary, denominators": KernelCase(
            vocab_softmax.statistics_kernel,
            arguments("logits_ptr", f"{numbers} sums_ptr", "width stride"),
            {"HAS_SUMS": True, **constants},
            "1 of 1",
        ),
        "vocabulary, softmax": KernelCase(
            vocab_softmax.softmax_kernel,
            arguments("logits_ptr out_ptr", f"{numbers} factors_ptr", "width stride out_stride"),
            {"HAS_FACTORS": True, **constants},
            "2 of 2",
        ),
    }


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


CASES = _norm_cases() | _gated_cases() | _dropout_cases() | _vocab_cases() | _attention_cases()
"""Name -> kernel."""


@functools.cache
def resources(name: str, target: str) -> Resources:
    """Compile the case `name` for `target` and read what it takes."""
    case = CASES[name]
    options = {k: v for k, v in case.constants.items() if k in ("num_warps", "num_stages")}
    constants = {k: v for k, v in case.constants.items() if k not in options}
    names = [p.name for p in case.kernel.params]
    assert set(names) == {*case.arguments, *constants}, "the case is not the kernel's signature"
    signature = {n: case.arguments.get(n, "constexpr") for n in names}
    # Pointers and widths are multiples of 16, as those of a model are.
    aligned = {
        (index,): [["tt.divisibility", 16]]
        for index, n in enumerate(names)
        if signature[n].startswith("*") or n.endswith(("width", "_s", "_b", "_n", "length"))
    }
    source = ASTSource(case.kernel, signature, constants, aligned)
    generation = int(re.sub(r"\D", "", target))
    compiled = triton.compile(source, target=GPUTarget("cuda", generation, 32), options=options)
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(compiled.asm["cubin"])
        file.flush()
        listing = subprocess.run(
            [TOOLS / "cuobjdump", "--dump-resource-usage", file.name],
            capture_output=True, text=True, check=True,
        ).stdout  # fmt: skip
    counts = {k: int(v) for k, v in re.findall(r"\b(REG|STACK|LOCAL):(\d+)", listing)}
    ptx = compiled.asm["ptx"]
    return Resources(
        registers=counts["REG"],
        spilled_bytes=counts["STACK"] + counts["LOCAL"],
        shared_bytes=compiled.metadata.shared,
        has_tensor_cores=bool(re.search(r"mma\.sync|wgmma|tcgen05", ptx)),
    )


def table() -> list[str]:
    """Return the lines of the table of docs/kernels.md."""
    lines = [
        "| kernel | tensors moved | " + " | ".join(SHARED_LIMIT) + " | spills |",
        "|---" * (len(SHARED_LIMIT) + 3) + "|",
    ]
    for name, case in CASES.items():
        found = [resources(name, target) for target in SHARED_LIMIT]
        cells = [f"{r.registers} / {_kib(r.shared_bytes)}" for r in found]
        spilled = max(r.spilled_bytes for r in found)
        lines.append(f"| {name} | {case.bytes_moved} | {' | '.join(cells)} | {spilled} |")
    return lines


def _kib(size: int) -> str:
    return f"{size} B" if size < 1024 else f"{size / 1024:.4g} KiB"


if __name__ == "__main__":
    print("\n".join(table()))
