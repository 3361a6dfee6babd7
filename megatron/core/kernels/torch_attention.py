"""Attention in plain torch: SDPA, the formula, attention to a KV cache, and blocks for the CPU.

Legend: s sequence, b micro batch, n query heads and g key/value heads of this rank, r = n/g query
heads per group, d and e widths of key and value heads, z = b*g.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from megatron.core.kernels.attention_options import AttentionOptions, raise_max_logits
from megatron.core.kernels.block_mask import key_range, masked_keys


def sdpa(query: Tensor, key: Tensor, value: Tensor, options: AttentionOptions) -> Tensor:
    """Attend to all keys or, by torch's causal flag, to earlier ones: flash kernels on GPUs.

    Args:
        query: [s, b, n, d]. key: [s, b, g, d]. value: [s, b, g, e]. options: see `AttentionKernel`.
    Returns:
        [s, b, n * e].
    """
    return _sdpa(query, key, value, options, None, is_causal=options.mask.window == (-1, 0))


def sdpa_with_mask(query: Tensor, key: Tensor, value: Tensor, options: AttentionOptions) -> Tensor:
    """Attend with a mask [.., sq, sk] of hidden keys: windows, documents, given masks.

    [sq, b, n, d], [sk, b, g, d], [sk, b, g, e] -> [sq, b, n*e].
    """
    mask = options.attention_mask
    hidden = options.masked_keys(query.shape[0], key.shape[0], query.device)
    if hidden is not None:
        mask = hidden if mask is None else mask | hidden
    if options.attention_bias is not None:
        bias = options.attention_bias.to(query.dtype)
        mask = bias if mask is None else bias.masked_fill(mask, float("-inf"))
    elif mask is not None:
        mask = ~mask  # torch: True takes part
    return _sdpa(query, key, value, options, mask, is_causal=False)


def _sdpa(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    options: AttentionOptions,
    mask: Tensor | None,
    *,
    is_causal: bool,
) -> Tensor:
    with options.seeded_dropout(query):
        # torch takes any strides: [s, b, n, d] is not copied.
        out = F.scaled_dot_product_attention(
            query.permute(1, 2, 0, 3),
            key.permute(1, 2, 0, 3),
            value.permute(1, 2, 0, 3),
            attn_mask=mask,
            dropout_p=options.dropout,
            is_causal=is_causal,
            scale=options.scale,
            enable_gqa=query.shape[2] != key.shape[2],
        )
    return out.permute(2, 0, 1, 3).reshape(*query.shape[:2], -1)


def unfused(query: Tensor, key: Tensor, value: Tensor, options: AttentionOptions) -> Tensor:
    """Attend by the formula, with the full matrix of scores [b, n, sq, sk].

    [sq, b, n, d], [sk, b, g, d], [sk, b, g, e] -> [sq, b, n*e].
    """
    sq, b, n, _ = query.shape
    sk, g = key.shape[0], key.shape[2]
    if g != n:
        key, value = (t.repeat_interleave(n // g, dim=2) for t in (key, value))
    in_fp32 = options.softmax_in_fp32 or options.layer_scaling != 1
    scores = scaled_scores(query, key, options, in_fp32=in_fp32)
    if options.attention_bias is not None:
        scores = scores + options.attention_bias
    hidden = options.masked_keys(sq, sk, query.device)
    for mask in (hidden, options.attention_mask):
        if mask is not None:
            scores = scores.masked_fill(mask, torch.finfo(scores.dtype).min)
    record_max_logits(scores, options)
    probabilities = softmax_with_sink(scores, options.sink).to(query.dtype)
    keep_mask = options.keep_mask(query, sk)
    if keep_mask is not None:
        probabilities = probabilities * keep_mask
    return weighted_values(probabilities, value)


def scaled_scores(
    query: Tensor, key: Tensor, options: AttentionOptions, *, in_fp32: bool
) -> Tensor:
    """Return the scaled and capped scores [b, n, sq, sk] of query [sq, b, n, d], key [sk, b, g, d].

    Args:
        in_fp32: return fp32 or wider; the product has the dtype of the activations.
    """
    sq, b, n, d = query.shape
    groups = b * key.shape[2]
    rows, columns = (t.permute(1, 2, 0, 3).reshape(groups, -1, d) for t in (query, key))
    # Division by the layer number keeps fp16 scores in range; later operations are in fp32.
    scaling = options.layer_scaling
    scores = torch.baddbmm(
        _not_read(rows, columns.shape[1]), rows, columns.transpose(1, 2), beta=0,
        alpha=options.scale / scaling,
    ).view(b, n, sq, -1)  # fmt: skip
    if in_fp32:
        scores = scores.to(torch.promote_types(scores.dtype, torch.float32))
    if scaling != 1:
        scores = scores * scaling
    if options.softcap is not None:
        scores = torch.tanh(scores / options.softcap) * options.softcap
    return scores


def record_max_logits(scores: Tensor, options: AttentionOptions) -> None:
    """Raise `options.max_logits`, if it is given, to the largest score of each head of scores
    [b, n, sq, sk]."""
    if options.max_logits is not None:
        highest = scores.detach().amax((0, 2, 3)).to(options.max_logits.dtype)
        torch.maximum(options.max_logits, highest, out=options.max_logits)


def softmax_with_sink(scores: Tensor, sink: Tensor | None) -> Tensor:
    """Return the probabilities [b, n, sq, sk]; a sink [n] adds to their denominator."""
    if sink is None:
        return torch.softmax(scores, -1)
    column = sink.to(scores.dtype).view(1, -1, 1, 1).expand(*scores.shape[:-1], 1)
    return torch.softmax(torch.cat((scores, column), -1), -1)[..., :-1]


def weighted_values(probabilities: Tensor, value: Tensor) -> Tensor:
    """Return the sums [sq, b, n*e] of value [sk, b, g, e], weighted by [b, n, sq, sk]."""
    b, n, sq, sk = probabilities.shape
    groups = b * value.shape[2]
    values = value.permute(1, 2, 0, 3).reshape(groups, sk, -1)
    out = torch.bmm(probabilities.reshape(groups, -1, sk), values)
    return out.view(b, n, sq, -1).permute(2, 0, 1, 3).reshape(sq, b, -1)


def kv_cache_attention(
    query: Tensor,
    keys: Tensor,
    values: Tensor,
    *,
    scale: float,
    hidden: Tensor | None,
    sink: Tensor | None = None,
    softcap: float | None = None,
) -> Tensor:
    """Attend with new tokens to a cache of keys and values.

    There are few queries and many keys, so the heads that share a group are rows of one product,
    and no key is copied per head. Legend: r = n/g, k keys in the cache.

    Args:
        query: [s, b, n, d]; head i uses group i // r.
        keys: [b, g, k, d], and values: [b, g, k, e]; views of a cache.
        hidden: [b, 1, s, 1, k], True where a key is hidden, or None.
        sink: [n], score of a key of value zero that every query sees, or None.
        softcap: bound c of the scaled scores, c * tanh(score / c), or None.
    Returns:
        [s, b, n*e].
    """
    s, b, n, d = query.shape
    g, k, e = keys.shape[1], keys.shape[2], values.shape[-1]
    r = n // g
    if s == 1:
        rows = query.reshape(b * g, r, d)
    else:
        rows = query.view(s, b, g, r, d).permute(1, 2, 0, 3, 4).reshape(b * g, s * r, d)
    columns = keys.flatten(0, 1).transpose(1, 2)
    scores = torch.baddbmm(_not_read(rows, k), rows, columns, beta=0, alpha=scale)
    if softcap is not None:
        scores.div_(softcap).tanh_().mul_(softcap)
    if hidden is not None:
        scores.view(b, g, s, r, k).masked_fill_(hidden, float("-inf"))
    if sink is None:
        probabilities = torch.softmax(scores, -1)
    else:
        column = sink.to(scores.dtype).view(1, g, 1, r, 1).expand(b, g, s, r, 1)
        joined = torch.cat((scores.view(b, g, s, r, k), column), -1)
        probabilities = torch.softmax(joined, -1)[..., :k].reshape(b * g, s * r, k)
    out = torch.bmm(probabilities, values.flatten(0, 1))
    if s == 1:
        return out.view(1, b, n * e)
    return out.view(b, g, s, r, e).permute(2, 0, 1, 3, 4).reshape(s, b, n * e)


BLOCK_ROWS = 128
"""Query positions per block: smaller wastes less on the diagonal, larger feeds longer products."""
MAX_KEPT_KEYS = 1024
"""Up to this sequence length the probabilities are kept for backward; beyond it (their size grows
with the square) they are computed again, at the price of one more product."""


def cpu_block_attention(
    query: Tensor, key: Tensor, value: Tensor, options: AttentionOptions
) -> Tensor:
    """Attend within a window, block by block of queries; queries and keys have the same positions.

    A block reads only the keys that its mask does not hide, so a causal mask costs half, and a
    window costs its width. Batched products reach the full rate also in bf16, where torch's CPU
    kernel computes at fp32 speed (measured: a causal forward and backward at sequence 512 takes 0.7
    of its time in fp32, 0.4 in bf16). Scores are rounded to the activations' dtype before the
    softmax: the error of bf16 gradients is less than twice the error of torch's kernel, which keeps
    scores in fp32.

    Args:
        query: [s, b, g*r, d].
        key, value: [s, b, g, d]; query head i uses group i // r.
        options: only scale, window, dropout and `max_logits` are read.
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
            # The products apply the scale and round once; a separate factor would round again.
            seen = keys[:, first:last]
            grad_rows[:, here] = torch.baddbmm(
                _not_read(grad_scores, seen.shape[-1]), grad_scores, seen, beta=0, alpha=scale
            )
            grad_keys[:, first:last].baddbmm_(
                grad_scores.transpose(1, 2), rows[:, here], alpha=scale
            )
        return grad_rows, grad_keys, grad_values, None, None, None, None, None


def _not_read(batch: Tensor, columns: int) -> Tensor:
    """Return an unread addend for `baddbmm` with beta=0: one element in the product's shape."""
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
