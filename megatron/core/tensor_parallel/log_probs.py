"""Log-probabilities and entropy of tokens whose vocabulary is split over tensor-parallel ranks.

As in the loss (`cross_entropy`), the logits are never gathered: each rank computes with its
columns, and four numbers per token are exchanged and merged in rank order.

Shapes: `t` tokens, `v` padded vocabulary; a slash divides by the tensor-parallel size.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from megatron.core.kernels.vocab_softmax import arithmetic_dtype, row_blocks
from megatron.core.process_groups_config import resolve_group
from megatron.core.tensor_parallel.vocab_parallel_softmax import (
    Labels,
    VocabShard,
    local_distribution,
    log_sum_of_units,
    merge_rows,
)
from megatron.core.topology.group import Group


class LogProbs(NamedTuple):
    """Probabilities of given tokens under a model; all tensors have the shape of the labels."""

    log_probs: Tensor
    """Natural logarithm of the probability of each token, fp32; 0 for `IGNORED_LABEL`."""
    entropy: Tensor
    """Entropy of the token's distribution in nats, fp32; 0 for `IGNORED_LABEL`."""
    is_greedy: Tensor
    """Bool: no other token is likelier. It has no gradient."""


def vocab_parallel_log_probs(
    vocab_parallel_logits: Tensor,
    target: Tensor,
    *,
    temperature: float = 1.0,
    tp_group: Group | None = None,
    num_valid: int | None = None,
    units: int = 1,
) -> LogProbs:
    """Return log-probability and entropy of every token, differentiable, computed in fp32.

    Args:
        vocab_parallel_logits: [..., v/tp] of any float dtype.
        target: token ids of the leading dimensions, equal on all ranks; tokens of `IGNORED_LABEL`
            (-100) are skipped.
        temperature: the logits are divided by it, as they were when the tokens were drawn.
        tp_group: None is the tensor-parallel group of the current collection.
        num_valid: number of real ids; columns beyond it pad the vocabulary and take no part. None
            means that all are real.
        units: of the whole vocabulary; above 1 the log-probabilities have the same bits in every
            layout.
    Returns:
        the same bits on all ranks of `tp_group`.
    Communication:
        one all-gather of four numbers per token on `tp_group`, with units another one of one number
        per token; none in backward.
    Raises:
        DataError: a token outside the vocabulary, on all ranks.
    """
    shard = VocabShard.of(vocab_parallel_logits.shape[-1], num_valid, resolve_group(tp_group, "tp"))
    found = _LogProbs.apply(vocab_parallel_logits, target, shard, float(temperature), units)
    return LogProbs(*found)


class _LogProbs(torch.autograd.Function):
    """Forward keeps the logits and four numbers a row; backward allocates the gradient only."""

    @staticmethod
    def forward(
        ctx: Any, logits: Tensor, target: Tensor, shard: VocabShard, temperature: float, units: int
    ) -> tuple[Tensor, Tensor, Tensor]:
        rows = logits.reshape(-1, logits.shape[-1])
        labels = Labels.locate(target, shard)
        dtype = arithmetic_dtype(rows)
        label_logit = rows.gather(1, labels.columns).to(dtype).masked_fill_(~labels.is_local, 0.0)
        local = torch.zeros((4, rows.shape[0]), dtype=dtype, device=rows.device)
        local[2] = label_logit.squeeze(1) / temperature
        for block in row_blocks(rows.shape[0], shard.num_local_valid, rows.device):
            found = local_distribution(rows[block], shard, temperature)
            local[0, block], local[1, block] = found.highest, found.log_sum
            local[3, block] = (found.probabilities * found.relative_logits).sum(-1)
        merged = merge_rows(local, shard.group)
        label, weighted = merged.others[:, 0].sum(0), merged.others[:, 1]
        log_sum = merged.log_sum
        if units > 1:
            log_sum = log_sum_of_units(rows.double() / temperature, merged.highest, shard, units)
        # fp64: a number near 8 that is rounded three times in fp32 has an error of 1e-6.
        log_probs = (label.double() - merged.highest - log_sum).to(dtype)
        # H = log Z - sum of p * logit; each rank's part is relative to its own highest logit.
        entropy = merged.log_sum - merged.mean(weighted + merged.highest_of_ranks - merged.highest)
        is_greedy = (label >= merged.highest) & ~labels.is_ignored
        ctx.save_for_backward(
            logits, labels.columns, labels.is_local, labels.is_ignored, merged.highest,
            log_sum.to(dtype), entropy,
        )  # fmt: skip
        ctx.shard, ctx.temperature = shard, temperature
        ctx.mark_non_differentiable(is_greedy)
        log_probs, entropy = (x.masked_fill(labels.is_ignored, 0.0) for x in (log_probs, entropy))
        shape = target.shape
        return log_probs.view(shape), entropy.view(shape), is_greedy.view(shape)

    @staticmethod
    def backward(
        ctx: Any, log_probs_grad: Tensor, entropy_grad: Tensor, _: Any
    ) -> tuple[Tensor | None, ...]:
        logits, columns, is_local, is_ignored, highest, log_sum, entropy = ctx.saved_tensors
        shard, temperature = ctx.shard, ctx.temperature
        rows = logits.reshape(-1, logits.shape[-1])
        of_label, of_entropy = (
            (grad.reshape(-1) / temperature).masked_fill(is_ignored, 0.0).unsqueeze(-1)
            for grad in (log_probs_grad, entropy_grad)
        )
        out = torch.zeros_like(rows)
        valid = shard.num_local_valid
        for block in row_blocks(rows.shape[0], valid, rows.device):
            logs = rows[block, :valid].to(highest.dtype) / temperature
            logs -= (highest + log_sum)[block].unsqueeze(-1)
            # d log p_y / dx_j = [j = y] - p_j, and dH / dx_j = -p_j * (log p_j + H).
            grad = -logs.exp() * (
                of_label[block] + of_entropy[block] * (logs + entropy[block].unsqueeze(-1))
            )
            if valid:
                own = of_label[block].masked_fill(~is_local[block], 0.0)
                grad.scatter_add_(1, columns[block], own)
            out[block, :valid] = grad.to(out.dtype)
        return out.view(logits.shape), None, None, None, None


def vocab_parallel_kl_divergence(
    vocab_parallel_logits: Tensor,
    target_logits: Tensor,
    *,
    temperature: float = 1.0,
    tp_group: Group | None = None,
    num_valid: int | None = None,
) -> Tensor:
    """Return KL(target || model) of every token, differentiable in the model's logits.

    The loss of logits distillation (G. Hinton et al., "Distilling the Knowledge in a Neural
    Network", section 2, arXiv 1503.02531), without its factor of temperature squared.

    Args:
        vocab_parallel_logits: [..., v/tp] of the student.
        target_logits: [..., v/tp] of the teacher; they get no gradient.
        temperature: divides both.
        tp_group, num_valid: as in `vocab_parallel_log_probs`.
    Returns:
        fp32 [...], the same bits on all ranks of `tp_group`.
    Communication:
        two all-gathers, of two and of three numbers per token, on `tp_group`; none in backward.
    """
    shard = VocabShard.of(vocab_parallel_logits.shape[-1], num_valid, resolve_group(tp_group, "tp"))
    return _KLDivergence.apply(
        vocab_parallel_logits, target_logits.detach(), shard, float(temperature)
    )


class _KLDivergence(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, logits: Tensor, target_logits: Tensor, shard: VocabShard, temperature: float
    ) -> Tensor:
        pair = [x.reshape(-1, x.shape[-1]) for x in (logits, target_logits)]
        num_rows, where = pair[0].shape[0], logits.device
        dtype = torch.promote_types(arithmetic_dtype(pair[0]), arithmetic_dtype(pair[1]))
        local = torch.zeros((5, num_rows), dtype=dtype, device=where)
        for block in row_blocks(num_rows, shard.num_local_valid, where):
            own, other = (local_distribution(x[block], shard, temperature) for x in pair)
            local[0, block], local[1, block] = own.highest, own.log_sum
            local[2, block], local[3, block] = other.highest, other.log_sum
            difference = other.relative_logits - own.relative_logits
            local[4, block] = (other.probabilities * difference).sum(-1)
        merged = merge_rows(local[:2], shard.group)
        target = merge_rows(local[2:], shard.group)
        # Each rank's difference is relative to its two highest logits.
        difference = (
            target.others[:, 0]
            + (target.highest_of_ranks - target.highest)
            - (merged.highest_of_ranks - merged.highest)
        )
        ctx.save_for_backward(
            logits, target_logits, merged.highest + merged.log_sum,
            target.highest + target.log_sum,
        )  # fmt: skip
        ctx.shard, ctx.temperature = shard, temperature
        divergence = target.mean(difference) - target.log_sum + merged.log_sum
        return divergence.view(logits.shape[:-1])

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        logits, target_logits, log_total, target_log_total = ctx.saved_tensors
        valid, temperature = ctx.shard.num_local_valid, ctx.temperature
        rows, target_rows = (x.reshape(-1, x.shape[-1]) for x in (logits, target_logits))
        scale = grad.reshape(-1, 1) / temperature
        out = torch.zeros_like(rows)
        for block in row_blocks(rows.shape[0], valid, rows.device):
            own, other = (
                (x[block, :valid].to(total.dtype) / temperature - total[block].unsqueeze(-1)).exp_()
                for x, total in ((rows, log_total), (target_rows, target_log_total))
            )
            out[block, :valid] = ((own - other) * scale[block]).to(out.dtype)
        return out.view(logits.shape), None, None, None
