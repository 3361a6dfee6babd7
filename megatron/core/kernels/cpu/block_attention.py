"""Softmax attention for the CPU, by blocks of query rows.

For each block of query positions only the keys that its mask leaves open are touched: half of the
work of a causal mask is never done, and a sliding window costs what it sees. Products go through
batched matrix multiplication, which reaches the machine's full rate also in bf16, where torch's
own CPU kernel computes at fp32 speed (measured: a causal forward and backward at sequence 512 takes
0.7 of its time in fp32, 0.4 in bf16). Scores are rounded to the activations' dtype before the
softmax, as in every unfused attention: the error of gradients in bf16 is less than twice that of
torch's kernel, which keeps scores in fp32.

Legend: s sequence, b micro-batch, g key/value groups, r query heads per group, d head dim,
z = b*g.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from megatron.core.kernels.attention_options import AttentionOptions, raise_max_logits
from megatron.core.kernels.block_mask import key_range, masked_keys

BLOCK_ROWS = 128
"""Query positions per block: smaller wastes less on the diagonal, larger feeds longer products."""
MAX_KEPT_KEYS = 1024
"""Up to this sequence length the probabilities are kept for backward; beyond it (their size grows
with the square) they are computed again, at the price of one more product."""


def cpu_block_attention(
    query: Tensor, key: Tensor, value: Tensor, options: AttentionOptions
) -> Tensor:
    """Attend within a window; queries and keys are the same positions.

    Args:
        query: [s, b, g*r, d].
        key, value: [s, b, g, d]; query head i uses group i // r.
        options: of which scale, window, dropout and `max_logits` are read.
    Returns:
        [s, b, g*r*d], contiguous.
    """
    s, b, n, d = query.shape
    g = key.shape[2]
    r = n // g
    # Rows of one group: positions, and within a position the heads that share the group.
    rows = query.view(s, b, g, r, d).permute(1, 2, 0, 3, 4).reshape(b * g, s * r, d)
    keys = key.permute(1, 2, 0, 3).reshape(b * g, s, d)
    values = value.permute(1, 2, 0, 3).reshape(b * g, s, d)
    keep_mask = options.keep_mask(query, s)
    if keep_mask is not None:
        keep_mask = keep_mask.view(b, g, r, s, s).transpose(2, 3).reshape(b * g, s * r, s)
    out = _BlockAttention.apply(
        rows, keys, values, keep_mask, options.scale, options.mask.window, r, options.max_logits
    )
    return out.view(b, g, s, r, d).permute(2, 0, 1, 3, 4).reshape(s, b, n * d)


class _BlockAttention(torch.autograd.Function):
    """rows [z, s*r, d], keys and values [z, s, d] -> [z, s*r, d]."""

    @staticmethod
    def forward(
        ctx: Any,
        rows: Tensor,
        keys: Tensor,
        values: Tensor,
        keep_mask: Tensor | None,
        scale: float,
        window: tuple[int, int],
        r: int,
        max_logits: Tensor | None,
    ) -> Tensor:
        num_keys = keys.shape[1]
        ctx.scale, ctx.window, ctx.r = scale, window, r
        ctx.blocks = [
            (begin, min(begin + BLOCK_ROWS, num_keys)) for begin in range(0, num_keys, BLOCK_ROWS)
        ]
        out = torch.empty_like(rows)
        kept = []
        for begin, end in ctx.blocks:
            first, last = key_range(begin, end, num_keys, window)
            p = _probabilities(rows, keys, begin, end, first, last, scale, window, r, max_logits)
            if num_keys <= MAX_KEPT_KEYS:
                kept.append(p)
            if keep_mask is not None:
                p = p * keep_mask[:, begin * r : end * r, first:last]
            out[:, begin * r : end * r] = torch.bmm(p, values[:, first:last])
        ctx.save_for_backward(rows, keys, values, keep_mask, *kept)
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
        rows, keys, values, keep_mask, *kept = ctx.saved_tensors
        num_keys, scale, r = keys.shape[1], ctx.scale, ctx.r
        grad_rows = torch.empty_like(rows)
        grad_keys, grad_values = torch.zeros_like(keys), torch.zeros_like(values)
        for index, (begin, end) in enumerate(ctx.blocks):
            first, last = key_range(begin, end, num_keys, ctx.window)
            p = (
                kept[index]
                if kept
                else _probabilities(rows, keys, begin, end, first, last, scale, ctx.window, r)
            )
            here = slice(begin * r, end * r)
            block_grad = grad[:, here]
            grad_p = torch.bmm(block_grad, values[:, first:last].transpose(1, 2))
            dropped = p
            if keep_mask is not None:
                factors = keep_mask[:, here, first:last]
                dropped = p * factors
                grad_p.mul_(factors)
            grad_values[:, first:last].baddbmm_(dropped.transpose(1, 2), block_grad)
            grad_scores = torch._softmax_backward_data(grad_p, p, -1, p.dtype)
            # The scale goes into the products, which round once: a factor afterwards rounds again.
            seen = keys[:, first:last]
            grad_rows[:, here] = torch.baddbmm(
                _not_read(grad_scores, seen.shape[-1]), grad_scores, seen, beta=0, alpha=scale
            )
            grad_keys[:, first:last].baddbmm_(
                grad_scores.transpose(1, 2), rows[:, here], alpha=scale
            )
        return grad_rows, grad_keys, grad_values, None, None, None, None, None


def _not_read(batch: Tensor, columns: int) -> Tensor:
    """Return what `baddbmm` with beta=0 is given to add: of the product's shape, of one element."""
    return batch.new_empty(1).expand(batch.shape[0], batch.shape[1], columns)


def _probabilities(
    rows: Tensor,
    keys: Tensor,
    begin: int,
    end: int,
    first: int,
    last: int,
    scale: float,
    window: tuple[int, int],
    r: int,
    max_logits: Tensor | None = None,
) -> Tensor:
    """Return the softmax of one block, [z, (end-begin)*r, last-first]; raise `max_logits` [g*r]."""
    block, seen = rows[:, begin * r : end * r], keys[:, first:last].transpose(1, 2)
    scores = torch.baddbmm(_not_read(block, last - first), block, seen, beta=0, alpha=scale)
    hidden = masked_keys(begin, end, first, last, window, rows.device)
    if hidden is not None:
        by_head = scores.view(scores.shape[0], end - begin, r, last - first)
        if window[0] < 0 and window[1] == 0:
            # Causal: only the keys of the block itself can be hidden.
            by_head, hidden = by_head[..., begin - first :], hidden[:, begin - first :]
        by_head.masked_fill_(hidden.unsqueeze(1), float("-inf"))
    if max_logits is not None:
        raise_max_logits(max_logits, scores.amax(-1), len(max_logits) // r)
    return torch.softmax(scores, -1)
