"""Kernels of our own in Triton, for accelerators that Triton compiles for.

Tests compare them with the plain formulas: `make gpu` on a GPU, and `make triton` in Triton's
interpreter on the CPU, which also compiles them for each generation of GPUs.
(P. Tillet et al., "Triton: an intermediate language and compiler for tiled neural network
computations", MAPL 2019.)

The modules import Triton, so nothing imports them but `deferred`.
"""

from __future__ import annotations

import importlib
import os
from collections.abc import Callable
from typing import Any

from megatron.core.foundation.device import device_type
from megatron.core.foundation.optional_imports import why_missing
from megatron.core.kernels.registry import Kernel

COMPILED_FOR = ("cuda", "xpu")
"""Device types that Triton compiles for; torch names AMD's GPUs "cuda"."""

DTYPES = frozenset({"float32", "bfloat16", "float16"})
"""Dtypes of activations; all compute in fp32."""


def missing() -> str | None:
    """Return why the kernels cannot run here; None if they can. `LATTICE_TRITON=0` forbids them."""
    if os.environ.get("LATTICE_TRITON") == "0":
        return "is switched off by LATTICE_TRITON=0"
    if device_type() not in COMPILED_FOR:
        return f"runs on {' and '.join(COMPILED_FOR)} devices"
    return why_missing("triton")


def deferred(module: str, function: str) -> Callable[..., Any]:
    """Return a function of a module here, which is imported at the first call."""

    def run(*args: Any) -> Any:
        found = importlib.import_module(f"{__name__}.{module}")
        return getattr(found, function)(*args)

    return run


def entry(
    module: str,
    function: str,
    supports: frozenset[str] = frozenset(),
    dtypes: frozenset[str] = DTYPES,
) -> Kernel[Callable[..., Any]]:
    """Return the entry "triton" of a table of kernels, for a function of a module here."""
    return Kernel(
        "triton",
        deferred(module, function),
        supports,
        dtypes=dtypes,
        missing=missing,
        library=True,
    )
