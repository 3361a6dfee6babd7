"""The table of products of consecutive rows with a matrix each.

Entries are functions of (x, counts, matrices, transposed). x is [n, i], ordered by matrix; `counts`
are the rows of each matrix. Matrices are [i, o], or [o, i] if `transposed`; the result is [n, o].
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from megatron.core.kernels.registry import OTHER_DEVICES, Kernel, KernelTable, Request
from megatron.core.kernels.row_counts import RowCounts, ends_of_rows
from megatron.core.parameters.param_meta import as_one_tensor


def torch_grouped_mm(
    x: Tensor, counts: Sequence[int], matrices: Sequence[Tensor], transposed: bool = False
) -> Tensor:
    """Multiply in one kernel: x [n, i] -> [n, o]. Adjacent matrices are not copied."""
    joined = as_one_tensor(matrices)
    if joined is None:
        joined = torch.stack(list(matrices))
    right = joined.transpose(1, 2) if transposed else joined
    return F.grouped_mm(x, right, offs=ends_of_rows(counts, x.device))


ROWS_OF_A_TILE = 32


def missing_rows(count: int) -> int:
    """Return how many rows `count` are from the next multiple of a tile."""
    return -count % ROWS_OF_A_TILE


def fill_tiles(rows: Tensor) -> Tensor:
    """Append zeros to rows [n, i] that a CPU multiplies in 16 bits, up to a multiple of a tile.

    oneDNN compiles such a product for each shape, which takes one to six milliseconds. The number
    of rows of an expert changes with each micro batch, so most shapes would be new.
    """
    if rows.element_size() != 2 or rows.device.type != "cpu":
        return rows
    missing = missing_rows(len(rows))
    return F.pad(rows, (0, 0, 0, missing)) if missing else rows


def loop(
    x: Tensor, counts: Sequence[int], matrices: Sequence[Tensor], transposed: bool = False
) -> Tensor:
    """Multiply run by run: x [n, i] -> [n, o]."""
    out = x.new_empty((x.shape[0], matrices[0].shape[0 if transposed else 1]))
    begin = 0
    for count, given in zip(counts, matrices, strict=True):
        if count:
            matrix = given.t() if transposed else given
            rows, result = x[begin : begin + count], out[begin : begin + count]
            filled = fill_tiles(rows)
            if filled is rows:
                torch.mm(rows, matrix, out=result)
            else:
                result.copy_(torch.mm(filled, matrix)[:count])
        begin += count
    return out


def _missing() -> str | None:
    return None if hasattr(F, "grouped_mm") else "needs a torch with functional.grouped_mm"


_LOOP = Kernel("loop", loop)

GROUPED_PRODUCTS: KernelTable[Callable[[Tensor, Sequence[int], Sequence[Tensor], bool], Tensor]] = (
    KernelTable(
        "grouped products",
        {
            # On a CPU torch's one kernel is the same loop, slower.
            "cpu": (_LOOP,),
            "cuda": (
                Kernel(
                    "torch-grouped-mm",
                    torch_grouped_mm,
                    dtypes=frozenset({"bfloat16"}),
                    missing=_missing,
                ),
                _LOOP,
            ),
            OTHER_DEVICES: (_LOOP,),
        },
    )
)


def grouped_products(
    x: Tensor, counts: Sequence[int], matrices: Sequence[Tensor], *, transposed: bool = False
) -> Tensor:
    """Multiply the rows of each group with its matrix, or its transpose: x [n, i] -> [n, o]."""
    return GROUPED_PRODUCTS.choose(Request.of(x)).kernel.run(x, counts, matrices, transposed)


def needs_no_host_counts(x: Tensor, counts: Sequence[int]) -> bool:
    """Return whether a device has counted the rows, and its kernel needs no counts on the host."""
    if not isinstance(counts, RowCounts):
        return False
    return GROUPED_PRODUCTS.choose(Request.of(x)).kernel.run is torch_grouped_mm


def grouped_outer_products(grad: Tensor, x: Tensor, counts: Sequence[int]) -> Tensor:
    """Return grad.T @ x of the rows of each group: [n, o], [n, i] -> [l, o, i]."""
    return F.grouped_mm(grad.t(), x, offs=ends_of_rows(counts, x.device))
