"""Attention by torch's own kernels, by the formula, and to a cache.

Legend: s sequence, b micro batch, n query heads and g key/value heads of this rank, d and e widths
of key and value heads.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from megatron.core.kernels.attention_options import AttentionOptions


def sdpa(query: Tensor, key: Tensor, value: Tensor, options: AttentionOptions) -> Tensor:
    """Attend to all keys or, by torch's causal flag, to earlier ones: flash kernels on GPUs.

    Args:
        query: [s, b, n, d]. key: [s, b, g, d]. value: [s, b, g, e]. options: see `AttentionKernel`.
    Returns:
        [s, b, n * e].
    """
    return _sdpa(query, key, value, options, None, is_causal=options.mask.window == (-1, 0))


def sdpa_with_mask(query: Tensor, key: Tensor, value: Tensor, options: AttentionOptions) -> Tensor:
    """Attend through a matrix [.., sq, sk] of what is hidden: windows, documents, given masks.

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
    sq, b, n, d = query.shape
    sk, g = key.shape[0], key.shape[2]
    keep_mask_of = query
    if g != n:
        key, value = (t.repeat_interleave(n // g, dim=2) for t in (key, value))
    # Division by the layer number keeps fp16 scores in range; the softmax, in fp32, undoes it.
    layer_scaling = options.layer_scaling
    q, k, v = (
        t.permute(1, 2, 0, 3).reshape(b * n, t.shape[0], t.shape[3]) for t in (query, key, value)
    )
    unused = q.new_empty(1).expand(b * n, sq, sk)
    scores = torch.baddbmm(
        unused, q, k.transpose(1, 2), beta=0, alpha=options.scale / layer_scaling
    ).view(b, n, sq, sk)
    if options.softmax_in_fp32 or layer_scaling != 1:
        scores = scores.float()
    if layer_scaling != 1:
        scores = scores * layer_scaling
    if options.softcap is not None:
        scores = torch.tanh(scores / options.softcap) * options.softcap
    if options.attention_bias is not None:
        scores = scores + options.attention_bias
    hidden = options.masked_keys(sq, sk, query.device)
    for mask in (hidden, options.attention_mask):
        if mask is not None:
            scores = scores.masked_fill(mask, torch.finfo(scores.dtype).min)
    if options.max_logits is not None:
        highest = scores.detach().amax((0, 2, 3)).to(options.max_logits.dtype)
        torch.maximum(options.max_logits, highest, out=options.max_logits)
    if options.sink is not None:
        column = options.sink.to(scores.dtype).view(1, n, 1, 1).expand(b, n, sq, 1)
        scores = torch.cat((scores, column), -1)
    probabilities = torch.softmax(scores, -1).to(query.dtype)
    if options.sink is not None:
        probabilities = probabilities[..., :-1]
    keep_mask = options.keep_mask(keep_mask_of, sk)
    if keep_mask is not None:
        probabilities = probabilities * keep_mask
    out = torch.bmm(probabilities.reshape(b * n, sq, sk), v)
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

    Few queries meet many keys, so the heads that share a group are rows of one product and no key
    is copied per head. Legend: r = n/g, k keys in the cache.

    Args:
        query: [s, b, n, d]; head i uses group i // r.
        keys: [b, g, k, d], and values: [b, g, k, e]; views of a cache.
        hidden: [b, 1, s, 1, k], True where a key is hidden; None if none is.
        sink: [n], score of a key that every query sees and nothing comes from, or None.
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
    unused = rows.new_empty(1).expand(b * g, s * r, k)
    scores = torch.baddbmm(unused, rows, keys.flatten(0, 1).transpose(1, 2), beta=0, alpha=scale)
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
