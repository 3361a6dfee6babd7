"""Compile each kernel ahead of time for four generations of GPUs, and count what it takes.

    python -m tests.gpu_without_gpu.triton_kernels.resources     # a table

Registers, stack and local memory (where registers spill to) and shared memory are those of the
compiled program, as NVIDIA's `cuobjdump` reads them.
"""

import functools
import re
import subprocess
import tempfile
from dataclasses import dataclass
from pathlib import Path

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from tests.gpu_without_gpu.triton_kernels.cases_of_layers import LAYER_CASES
from tests.gpu_without_gpu.triton_kernels.cases_of_numbers import NUMBER_CASES

MULTIPLES = ("width", "_s", "_b", "_n", "_group", "length", "pairs")
"""Ends of names of integers that are multiples of 16 in models."""
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
class Resources:
    """What a compiled kernel takes."""

    registers: int
    spilled_bytes: int
    """Per thread: stack and local memory."""
    shared_bytes: int


CASES = LAYER_CASES | NUMBER_CASES
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
        if signature[n].startswith("*") or n.endswith(MULTIPLES)
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
    return Resources(
        registers=counts["REG"],
        spilled_bytes=counts["STACK"] + counts["LOCAL"],
        shared_bytes=compiled.metadata.shared,
    )


def table() -> list[str]:
    """Return the lines of a table of all kernels."""
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
