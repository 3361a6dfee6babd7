"""Softmax over the columns of a rank, row block by row block, and the table of its kernels.

The passes over logits are bound by memory, so each block of rows is small enough to stay in the
cache (on an accelerator: large enough to fill it) and arithmetic is fp32 whatever the dtype of the
logits.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TypeAlias

import torch
from torch import Tensor

from megatron.core.kernels import triton_kernels
from megatron.core.kernels.registry import OTHER_DEVICES, Kernel, KernelTable, Request

BLOCK_BYTES = {"cpu": 2 * 2**20, OTHER_DEVICES: 256 * 2**20}
"""Fp32 bytes of a block of rows, by device type: on a CPU what a core's cache holds."""


def row_blocks(rows: int, columns: int, device: torch.device) -> Iterator[slice]:
    """Cut `rows` into blocks of about the size of the cache."""
    budget = BLOCK_BYTES.get(device.type, BLOCK_BYTES[OTHER_DEVICES])
    step = max(1, budget // (4 * max(columns, 1)))
    for begin in range(0, rows, step):
        yield slice(begin, min(begin + step, rows))


def arithmetic_dtype(x: Tensor) -> torch.dtype:
    """Return the dtype to compute in: fp32, or fp64 for fp64 (which gradient checks need)."""
    return torch.promote_types(x.dtype, torch.float32)


def scratch_block(x: Tensor, columns: int) -> Tensor:
    """Return memory, in the arithmetic dtype, for one block of `row_blocks` of x [t, ...]."""
    first = next(row_blocks(x.shape[0], columns, x.device), slice(0, 0))
    return torch.empty((first.stop, columns), dtype=arithmetic_dtype(x), device=x.device)


def torch_softmax(logits: Tensor, out: Tensor) -> tuple[Tensor, Tensor]:
    """See `local_softmax`; logits and out [r, c]. One vectorised kernel of three passes.

    It reads an element before it writes there, so input and output may be the same memory.
    """
    highest = logits.amax(-1)
    torch.softmax(logits, -1, out=out)
    # The largest probability is 1/sum exactly, and never underflows.
    return highest, -out.amax(-1).log_()


def elementwise_softmax(logits: Tensor, out: Tensor) -> tuple[Tensor, Tensor]:
    """See `local_softmax`; logits and out [r, c]. In place, by elementwise kernels."""
    highest = logits.amax(-1)
    torch.sub(logits, highest.unsqueeze(-1), out=out)
    total = out.exp_().sum(-1, keepdim=True)
    out.div_(total)
    return highest, total.squeeze(-1).log_()


VOCAB_SOFTMAX: KernelTable[Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]] = KernelTable(
    "softmax over the vocabulary",
    {
        "cpu": (Kernel("torch-softmax", torch_softmax),),
        OTHER_DEVICES: (Kernel("elementwise", elementwise_softmax),),
    },
)


def local_softmax(logits: Tensor, out: Tensor) -> tuple[Tensor, Tensor]:
    """Write the softmax over the local columns to `out`.

    Args:
        logits: [r, c] of any float dtype; may be `out` itself.
        out: [r, c] in the arithmetic dtype, contiguous.
    Returns:
        the highest logit of each row, and the log of the sum of exponentials relative to it: two
        [r], since adding them up would lose the small one beside a large logit.
    """
    if logits.dtype != out.dtype:
        logits = out.copy_(logits)
    return VOCAB_SOFTMAX.choose(Request.of(out)).kernel.run(logits, out)


def softmax_by_blocks(
    logits: Tensor, out: Tensor | None, factors: Tensor | None, sums: Tensor | None
) -> tuple[Tensor, Tensor]:
    """See `row_softmax`; logits and out [r, c]. A block of rows is in the arithmetic dtype."""
    rows, columns = logits.shape
    dtype = arithmetic_dtype(logits)
    statistics = torch.empty((2, rows), dtype=dtype, device=logits.device)
    is_direct = factors is None and out is not None and out.dtype == dtype and out.is_contiguous()
    scratch = out if is_direct and out is not None else scratch_block(logits, columns)
    for block in row_blocks(rows, columns, logits.device):
        part = scratch[block] if is_direct else scratch[: block.stop - block.start]
        if sums is not None:
            sums[block] = logits[block].sum(-1, dtype=dtype)
        statistics[0, block], statistics[1, block] = local_softmax(logits[block], part)
        if out is None or is_direct:
            continue
        if factors is None:
            out[block].copy_(part)
        elif out.dtype == dtype:
            torch.mul(part, factors[block].unsqueeze(-1), out=out[block])
        else:
            out[block].copy_(part.mul_(factors[block].unsqueeze(-1)))
    return statistics[0], statistics[1]


RowSoftmax: TypeAlias = Callable[
    [Tensor, Tensor | None, Tensor | None, Tensor | None], tuple[Tensor, Tensor]
]
_BY_BLOCKS = Kernel("by-blocks", softmax_by_blocks)

ROW_SOFTMAX: KernelTable[RowSoftmax] = KernelTable(
    "softmax of whole rows",
    {
        "cpu": (_BY_BLOCKS,),
        OTHER_DEVICES: (
            triton_kernels.entry("vocab_softmax", "row_softmax"),
            _BY_BLOCKS,
        ),
    },
)


def row_softmax(
    logits: Tensor,
    *,
    out: Tensor | None = None,
    factors: Tensor | None = None,
    sums: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Find the denominators of the softmax over the local columns, and write it if asked.

    Args:
        logits: [r, c] of any float dtype.
        out: [r, c] of the same dtype, may be `logits` itself: receives the softmax times `factors`.
        factors: [r] in the arithmetic dtype; None is 1.
        sums: [r] in the arithmetic dtype, receives the sum of the logits.
    Returns:
        two [r] in the arithmetic dtype; see `local_softmax`.
    """
    return ROW_SOFTMAX.choose(Request.of(logits)).kernel.run(logits, out, factors, sums)
