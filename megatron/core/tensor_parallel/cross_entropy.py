"""Cross entropy of logits whose vocabulary is split over the tensor-parallel ranks.

The logits are never gathered (Megatron-LM, section 3, arXiv 1909.08053): each rank computes the
softmax of its columns, and three numbers per token are exchanged.

Shapes: `s` sequence, `b` micro batch, `v` padded vocabulary, `t` = s*b; a slash divides by the
tensor-parallel size.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from megatron.core.foundation.errors import ConfigError
from megatron.core.foundation.optional_imports import require
from megatron.core.kernels.vocab_softmax import RowStatistics
from megatron.core.process_groups_config import resolve_group
from megatron.core.tensor_parallel.vocab_parallel_softmax import (
    IGNORED_LABEL,
    Labels,
    VocabShard,
    check_token_ids,
    cross_entropy_gradient,
    cross_entropy_statistics,
)
from megatron.core.topology.group import Group
from megatron.core.transport import collectives
from megatron.core.transport.transport import tree_sum

_VECTOR = 64
"""Kernels compute the last elements by other instructions if they do not fill a vector; a multiple
of this number fills all vectors."""


def vocab_parallel_cross_entropy(
    vocab_parallel_logits: Tensor,
    target: Tensor,
    label_smoothing: float = 0.0,
    tp_group: Group | None = None,
    num_valid: int | None = None,
    overwrite_logits: bool = False,
    units: int = 0,
) -> Tensor:
    """Return the loss of every token, computed in fp32.

    Args:
        vocab_parallel_logits: [s, b, v/tp] of any float dtype (any leading dimensions).
        target: labels [s, b], equal on all ranks; `IGNORED_LABEL` (-100) gives a loss of zero.
        label_smoothing: probability taken from the label and spread over the other ids.
        tp_group: None is the tensor-parallel group of the current collection.
        num_valid: number of real ids; columns beyond it pad the vocabulary and take no part.
            None means that all are real.
        overwrite_logits: the caller does not need the logits any more: backward writes the gradient
            into their memory (on some devices forward writes the softmax there), so no tensor of
            size [s, b, v/tp] is allocated.
        units: of the whole vocabulary; with units the loss has the same bits in every layout.
    Returns:
        fp32 [s, b], the same bits on all ranks.
    Communication:
        one all-gather of three (with smoothing four) numbers per token.
    Raises:
        DataError: a label outside the vocabulary, on all ranks.
        ConfigError: smoothing with units.
    """
    shard = VocabShard.of(vocab_parallel_logits.shape[-1], num_valid, resolve_group(tp_group, "tp"))
    if units:
        if label_smoothing:
            raise ConfigError(
                f"label_smoothing={label_smoothing} with layout_invariant_mode.",
                rule="the loss of units has no mean over the vocabulary",
                fix="drop one of them",
            )
        return _UnitCrossEntropy.apply(
            vocab_parallel_logits, target, shard, units // shard.group.size()
        )
    return _CrossEntropy.apply(
        vocab_parallel_logits, target, shard, float(label_smoothing), overwrite_logits
    )


def transformer_engine_cross_entropy(
    vocab_parallel_logits: Tensor, target: Tensor, *, tp_group: Group, num_valid: int | None
) -> Tensor:
    """Return the loss of every token by the kernel of Transformer Engine, in fp32.

    Written from its documented interface and **not run on a GPU**.

    Args:
        vocab_parallel_logits: [s, b, v/tp]; their memory becomes the gradient.
        target: labels [s, b], equal on all ranks; `IGNORED_LABEL` (-100) gives a loss of zero.
        num_valid: number of real ids; None means that all are real.
    Returns:
        fp32 [s, b].
    Communication:
        the collectives of the library, on `tp_group`.
    Raises:
        DataError: a label outside the vocabulary, on all ranks.
    """
    library = require("transformer_engine.pytorch", purpose="--cross-entropy-fusion-impl te")
    shard = VocabShard.of(vocab_parallel_logits.shape[-1], num_valid, tp_group)
    check_token_ids(target, shard.num_valid, what="label", ignored=IGNORED_LABEL)
    if shard.num_local_valid < shard.num_local:
        # The library treats every column as an id.
        lowest = torch.finfo(vocab_parallel_logits.dtype).min
        is_padding = torch.arange(shard.num_local, device=target.device) >= shard.num_local_valid
        vocab_parallel_logits = vocab_parallel_logits.masked_fill(is_padding, lowest)
    # Before 2.10 it accepts no keywords: no smoothing, and no mean over the tokens.
    group = tp_group if tp_group.size() > 1 else None
    return library.parallel_cross_entropy(vocab_parallel_logits, target, 0.0, False, group)


class _CrossEntropy(torch.autograd.Function):
    """Forward keeps the logits and a few numbers a row; backward allocates the gradient only.

    With `overwrites`, backward writes the gradient in place of the logits.
    """

    @staticmethod
    def forward(
        ctx: Any,
        logits: Tensor,
        target: Tensor,
        shard: VocabShard,
        label_smoothing: float,
        overwrites: bool,
    ) -> Tensor:
        rows = logits.view(-1, logits.shape[-1]) if overwrites else _rows(logits)
        labels = Labels.locate(target, shard)
        in_place = overwrites and ctx.needs_input_grad[0]
        statistics = cross_entropy_statistics(
            rows, labels, shard, label_smoothing, in_place=in_place
        )
        ctx.save_for_backward(
            None if overwrites else logits,
            labels.columns,
            labels.is_local,
            labels.is_ignored,
            statistics.label_probability,
            statistics.highest,
            statistics.log_sum,
            statistics.local_fraction,
        )
        # These rows bypass the saved tensors: their version check would count the overwriting as
        # damage.
        ctx.rows = rows if in_place else None
        ctx.shape, ctx.shard, ctx.label_smoothing = logits.shape, shard, label_smoothing
        ctx.overwrites = overwrites
        return statistics.loss.view(target.shape)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        logits, columns, is_local, is_ignored, *numbers = ctx.saved_tensors
        labels = Labels(columns, is_local, is_ignored)
        statistics = RowStatistics(numbers[0], *numbers)
        scale = grad.reshape(-1).to(numbers[0].dtype).masked_fill(is_ignored, 0.0)
        if ctx.overwrites:
            rows, ctx.rows = ctx.rows, None
            assert rows is not None, "overwritten logits allow one backward pass only"
            out = rows
        else:
            rows = _rows(logits)
            out = torch.empty_like(rows)
        cross_entropy_gradient(rows, out, statistics, labels, ctx.shard, ctx.label_smoothing, scale)
        return out.view(ctx.shape), None, None, None, None


class _UnitCrossEntropy(torch.autograd.Function):
    """Cross entropy whose exponentials are added per unit of the vocabulary, then in a tree."""

    @staticmethod
    def forward(ctx: Any, logits: Tensor, target: Tensor, shard: VocabShard, units: int) -> Tensor:
        rows, group = _rows(logits).to(torch.float32, copy=True), shard.group
        labels = Labels.locate(target, shard)
        rows[:, shard.num_local_valid :] = -torch.inf
        at_label = rows.gather(1, labels.columns).masked_fill_(~labels.is_local, 0.0).squeeze(1)
        local = torch.stack([rows.amax(-1), at_label])
        shared = (
            collectives.all_gather(local.unsqueeze(0), group) if group.size() > 1 else local[None]
        )
        highest = shared[:, 0].amax(0)
        rows.sub_(highest.unsqueeze(-1)).exp_()
        total = tree_sum(list(rows.view(len(rows), units, -1).sum(-1).unbind(1)))
        if group.size() > 1:
            total = tree_sum(list(collectives.all_gather(total.clone().unsqueeze(0), group)))
        filled = F.pad(total, (0, -len(total) % _VECTOR), value=1.0)
        loss = filled.log()[: len(total)] + highest - shared[:, 1].sum(0)
        ctx.save_for_backward(rows.div_(total.unsqueeze(-1)), *vars(labels).values())
        ctx.shape, ctx.dtype = logits.shape, logits.dtype
        return loss.masked_fill(labels.is_ignored, 0.0).view(target.shape)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        softmax, columns, is_local, is_ignored = ctx.saved_tensors
        scale = grad.reshape(-1, 1).masked_fill(is_ignored.unsqueeze(1), 0.0)
        out = softmax * scale
        out.scatter_add_(1, columns, torch.where(is_local, -scale, 0.0))
        return out.to(ctx.dtype).view(ctx.shape), None, None, None


def _rows(logits: Tensor) -> Tensor:
    """View logits [..., v/tp] as [t, v/tp]; copied only if they are not contiguous."""
    return logits.reshape(-1, logits.shape[-1]).contiguous()
