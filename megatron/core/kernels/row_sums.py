"""The table of sums into rows of a matrix: functions of (table [v, h], rows [t], values [t, h])."""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor

from megatron.core.kernels.registry import OTHER_DEVICES, Kernel, KernelTable, Request


def index_add(table: Tensor, rows: Tensor, values: Tensor) -> None:
    """Add values [t, h] to rows [t] of table [v, h], one after the other."""
    table.index_add_(0, rows, values)


def sorted_index_put(table: Tensor, rows: Tensor, values: Tensor) -> None:
    """Add values [t, h] to rows [t] of table [v, h], sorted by row.

    `index_add_` uses atomics on GPUs, so its order changes from run to run.
    """
    table.index_put_((rows,), values, accumulate=True)


ROW_SUMS: KernelTable[Callable[[Tensor, Tensor, Tensor], None]] = KernelTable(
    "sums into rows",
    {
        "cpu": (Kernel("index-add", index_add),),
        OTHER_DEVICES: (Kernel("sorted-index-put", sorted_index_put),),
    },
)


def add_rows(table: Tensor, rows: Tensor, values: Tensor) -> None:
    """Add values [t, h] to the given rows [t] of table [v, h], in an order that never changes."""
    values = values.to(table.dtype)
    ROW_SUMS.choose(Request.of(table)).kernel.run(table, rows, values)
