"""Softmax over the columns of a rank, row block by row block, and the table of its kernels.

The passes over logits are bound by memory, so each block of rows is small enough to stay in the
cache (on an accelerator: large enough to fill it) and arithmetic is fp32 whatever the dtype of the
logits.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch
from torch import Tensor

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
