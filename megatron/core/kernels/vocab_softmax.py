"""Softmax and cross entropy over the columns of a rank, and the tables of their kernels.

The passes over logits are bound by memory, so each block of rows is small enough to stay in the
cache (on an accelerator: large enough to fill it) and arithmetic is fp32 whatever the dtype of the
logits.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from megatron.core.kernels import triton_kernels
from megatron.core.kernels.registry import OTHER_DEVICES, Kernel, KernelTable, Request

BLOCK_BYTES = {"cpu": 2 * 2**20, OTHER_DEVICES: 256 * 2**20}
"""Fp32 bytes of a block of rows, by device type; on a CPU a block fits a core's cache."""


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
        [r], since their sum would lose the bits of a small log next to a large logit.
    """
    if logits.dtype != out.dtype:
        logits = out.copy_(logits)
    return VOCAB_SOFTMAX.choose(Request.of(out)).kernel.run(logits, out)


def row_softmax(
    logits: Tensor,
    *,
    out: Tensor | None = None,
    factors: Tensor | None = None,
    sums: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Compute the denominators of the softmax over the local columns; with `out`, write it.

    Args:
        logits: [r, c] of any float dtype.
        out: [r, c] of the same dtype, may be `logits` itself: receives the softmax times `factors`.
        factors: [r] in the arithmetic dtype; None is 1.
        sums: [r] in the arithmetic dtype, receives the sum of the logits.
    Returns:
        two [r] in the arithmetic dtype; see `local_softmax`.
    """
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


def multiply_rows(x: Tensor, coefficient: Tensor) -> None:
    """Multiply the rows of x [t, c] by coefficients [t] in place, rounding once."""
    if x.dtype == coefficient.dtype:
        x.mul_(coefficient.unsqueeze(-1))
        return
    rows, columns = x.shape
    scratch = scratch_block(x, columns)
    for block in row_blocks(rows, columns, x.device):
        part = scratch[: block.stop - block.start].copy_(x[block])
        x[block].copy_(part.mul_(coefficient[block].unsqueeze(-1)))


@dataclass(frozen=True)
class RowStatistics:
    """Statistics of each row for a cross entropy, [r] each, in the arithmetic dtype."""

    loss: Tensor
    label_probability: Tensor
    """Probability of the label: the gradient there is p - 1, which would cancel in bf16."""
    highest: Tensor
    """Highest logit of all ranks' columns."""
    log_sum: Tensor
    """Logarithm of the sum of all ranks' exponentials relative to it."""
    local_fraction: Tensor | None
    """Probability mass of this rank's columns; None if the rank holds all columns."""


@dataclass(frozen=True)
class Targets:
    """Targets of rows of logits [r, c]: the gradient of a loss is p - target, scaled."""

    columns: Tensor
    """[r, 1] column of the label; undefined where another rank holds the column."""
    is_local: Tensor
    """[r, 1] whether the label's column is here."""
    num_valid: int
    """Leading columns that are ids; the columns after them are padding."""
    on_label: float = 1.0
    """Target probability of the label in addition to the uniform part."""
    uniform: float = 0.0
    """Target probability of each id (label smoothing)."""


class LogitRows(Protocol):
    """The two passes of a cross entropy over rows of logits."""

    def measure(self, logits: Tensor, targets: Targets, local: Tensor, *, in_place: bool) -> None:
        """Compute the statistics that the loss needs, from at least one column of ids.

        Args:
            logits: [r, c], contiguous; with `in_place` `gradient` will write into them.
            local: [3 or 4, r], receives the highest logit, the log of the sum of exponentials
                relative to it, the logit of the label (zero where it is not here) and the sum of
                the logits.
        """

    def gradient(
        self,
        rows: Tensor,
        out: Tensor,
        statistics: RowStatistics,
        targets: Targets,
        scale: Tensor | None,
    ) -> None:
        """Write the gradient of the logits, zeros at padding.

        Args:
            rows: [r, c], the logits; if `measure` was `in_place`, its result.
            out: [r, c]; `rows` itself if it was `in_place`.
            scale: [r] in the arithmetic dtype, the gradient of each row's loss; None is 1.
        """


class KeptSoftmax:
    """With `in_place`, `measure` replaces the logits by their softmax, rounded to their dtype.

    So no exponential is computed twice, which dominates the time on a CPU; see `LogitRows`.
    """

    def measure(self, logits: Tensor, targets: Targets, local: Tensor, *, in_place: bool) -> None:
        """See `LogitRows`; [r, c] -> [3 or 4, r]."""
        label_logit = logits.gather(1, targets.columns).to(local.dtype)
        local[2] = label_logit.masked_fill_(~targets.is_local, 0.0).squeeze(1)
        columns = logits[:, : targets.num_valid]
        local[0], local[1] = row_softmax(
            columns, out=columns if in_place else None, sums=local[3] if len(local) > 3 else None
        )
        if in_place and targets.num_valid < logits.shape[1]:
            logits[:, targets.num_valid :].zero_()

    def gradient(
        self,
        rows: Tensor,
        out: Tensor,
        statistics: RowStatistics,
        targets: Targets,
        scale: Tensor | None,
    ) -> None:
        """See `LogitRows`; [r, c]."""
        factors, valid = statistics.local_fraction, targets.num_valid
        if scale is not None:
            factors = scale if factors is None else factors * scale
        if out is rows:
            if factors is not None:
                multiply_rows(out, factors)
        else:
            out[:, valid:].zero_()
            if valid:
                row_softmax(rows[:, :valid], out=out[:, :valid], factors=factors)
        at_label = statistics.label_probability - targets.on_label - targets.uniform
        if targets.uniform:
            uniform = targets.uniform
            ids = out[:, :valid]
            if scale is None:
                ids.sub_(uniform)
            else:
                ids.sub_((scale * uniform).to(out.dtype).unsqueeze(-1))
        if scale is not None:
            at_label = at_label * scale
        present = out.gather(1, targets.columns)
        at_label = torch.where(targets.is_local, at_label.to(out.dtype).unsqueeze(-1), present)
        # scatter_ would copy the full tensor on the CPU.
        every_row = torch.arange(out.shape[0], device=out.device)
        out.index_put_((every_row, targets.columns.squeeze(1)), at_label.squeeze(1))


_KEPT_SOFTMAX = Kernel("kept-softmax", KeptSoftmax)

CROSS_ENTROPY: KernelTable[Callable[[], LogitRows]] = KernelTable(
    "cross entropy of rows",
    {
        "cpu": (_KEPT_SOFTMAX,),
        OTHER_DEVICES: (triton_kernels.entry("vocab_softmax", "KeptLogits"), _KEPT_SOFTMAX),
    },
)


def logit_rows(logits: Tensor) -> LogitRows:
    """Return the implementation for the cross entropy of logits [r, c]."""
    return CROSS_ENTROPY.choose(Request.of(logits)).kernel.run()
