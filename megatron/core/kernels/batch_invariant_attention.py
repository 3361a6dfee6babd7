"""Attention whose bits for a query depend on the query and its keys alone.

The number of sequences, padding, and the division of a sequence into passes over a cache change
nothing: every product has `ROWS` rows and `KEYS` keys, blocks of keys begin at multiples of `KEYS`,
and their sums are added in ascending order. A block without visible keys adds exact zeros.

The sums are the online softmax of M. Milakov and N. Gimelshein, "Online normalizer calculation for
softmax", section 3, arXiv 1805.02867, in fp32.

Legend: s queries, b sequences, n query heads and g key/value groups of this rank, r = n/g, k keys,
d and e widths of key and value heads, z = b*g.
"""

from __future__ import annotations

import functools

import torch
import torch.nn.functional as F
from torch import Tensor

from megatron.core.kernels.attention_options import AttentionOptions

ROWS, KEYS = 32, 64


def batch_invariant_kernel(
    query: Tensor, key: Tensor, value: Tensor, options: AttentionOptions
) -> Tensor:
    """Attend without a cache; see `AttentionKernel`."""
    s = query.shape[0]
    num_keys, g = key.shape[0], key.shape[2]
    masks = [options.masked_keys(s, num_keys, query.device), options.attention_mask]
    given = [found for mask in masks if (found := _by_group(mask, g)) is not None]
    return batch_invariant_attention(
        query,
        key.permute(1, 2, 0, 3),
        value.permute(1, 2, 0, 3),
        scale=options.scale,
        hidden=functools.reduce(torch.logical_or, given) if given else None,
        bias=_by_group(options.attention_bias, g),
        factors=_by_group(options.keep_mask(query, num_keys), g),
        sink=options.sink,
        softcap=options.softcap,
    )


def _by_group(x: Tensor | None, groups: int) -> Tensor | None:
    """Return x, broadcastable to [b, n, s, k], in a shape broadcastable to [b, g, s, r, k]."""
    if x is None:
        return None
    x = x[(None,) * (4 - x.dim())]
    return x.unsqueeze(3) if x.shape[1] == 1 else x.unflatten(1, (groups, -1)).transpose(2, 3)


def batch_invariant_attention(
    query: Tensor,
    keys: Tensor,
    values: Tensor,
    *,
    scale: float,
    hidden: Tensor | None,
    bias: Tensor | None = None,
    factors: Tensor | None = None,
    sink: Tensor | None = None,
    softcap: float | None = None,
) -> Tensor:
    """Attend, differentiably.

    Args:
        query: [s, b, n, d]; head i uses group i // r.
        keys: [b, g, k, d], and values: [b, g, k, e].
        hidden: bool, True where a key is hidden, broadcastable to [b, g, s, r, k], or None.
        bias: added to the scaled scores, of such a shape.
        factors: on the probabilities (dropout), of such a shape.
        sink: [n], score of a key of value zero that every query sees, or None.
        softcap: bound c of the scaled scores, c * tanh(score / c), or None.
    Returns:
        [s, b, n*e].
    """
    s, b, n, d = query.shape
    g, num_keys = keys.shape[1:3]
    r = n // g
    rows = query.view(s, b, g, r, d).permute(1, 2, 0, 3, 4).reshape(b * g, s * r, d).float()
    highest = rows.new_full((b * g, s * r, 1), torch.finfo(torch.float32).min)
    total = torch.zeros_like(highest)
    if sink is not None:
        highest = sink.float().view(g, 1, r).expand(b, g, s, r).reshape(highest.shape)
        total = torch.ones_like(highest)
    out = rows.new_zeros(b * g, s * r, values.shape[-1])
    if hidden is None:
        hidden = torch.zeros(1, 1, 1, 1, num_keys, dtype=torch.bool, device=query.device)

    def block_of(x: Tensor, begin: int, fill: float = 0.0) -> Tensor:
        """Return [z, s*r, KEYS] of a tensor that is broadcastable to [b, g, s, r, k]."""
        part = x[..., begin : begin + KEYS]
        part = F.pad(part, (0, KEYS - part.shape[-1]), value=fill)
        return part.expand(b, g, s, r, KEYS).reshape(b * g, s * r, KEYS)

    for begin in range(0, num_keys, KEYS):
        key, value = (_keys_of(x, begin) for x in (keys, values))
        scores = _product(rows, key.transpose(1, 2)) * scale
        if softcap is not None:
            scores = torch.tanh(scores / softcap) * softcap
        if bias is not None:
            scores = scores + block_of(bias, begin)
        scores = scores.masked_fill(block_of(hidden, begin, fill=True), -torch.inf)
        new = torch.maximum(highest, scores.detach().amax(-1, keepdim=True))
        shrinking = (highest - new).exp()
        weights = (scores - new).exp()
        total = total * shrinking + weights.sum(-1, keepdim=True)
        if factors is not None:
            weights = weights * block_of(factors, begin)
        out = out * shrinking + _product(weights, value)
        highest = new
    out = (out / total).to(query.dtype)
    return out.view(b, g, s, r, -1).permute(2, 0, 1, 3, 4).reshape(s, b, -1)


def _keys_of(x: Tensor, begin: int) -> Tensor:
    """Return keys or values begin ... begin + KEYS of x [b, g, k, d]: [z, KEYS, d], fp32."""
    part = x[:, :, begin : begin + KEYS].flatten(0, 1).float()
    return F.pad(part, (0, 0, 0, KEYS - part.shape[1]))


def _product(left: Tensor, right: Tensor) -> Tensor:
    """Return left [z, t, i] @ right [z, i, j], with `ROWS` rows in each product."""
    z, t, width = left.shape
    padded = F.pad(left, (0, 0, 0, -t % ROWS))
    count = padded.shape[1] // ROWS
    blocks = torch.bmm(padded.reshape(z * count, ROWS, width), right.repeat_interleave(count, 0))
    return blocks.view(z, count * ROWS, -1)[:, :t]
