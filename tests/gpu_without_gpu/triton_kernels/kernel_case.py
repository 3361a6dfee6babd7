"""One kernel at one size, as the compiler needs to know it."""

from dataclasses import dataclass, field
from typing import Any


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


def arguments(half: str = "", floats: str = "", ints: str = "", reals: str = "") -> dict[str, str]:
    """Return types by name: pointers to bf16, pointers to fp32, integers, fp32 numbers."""
    kinds = {"*bf16": half, "*fp32": floats, "i32": ints, "fp32": reals}
    return {name: kind for kind, names in kinds.items() for name in names.split()}
