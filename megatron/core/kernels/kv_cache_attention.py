"""Attention of new tokens to a cache of keys and values.

Few queries meet many keys here, so the heads that share a group are rows of one product and no
key is copied per head.

Legend: s new tokens, b rows, n query heads, g key/value groups, r = n/g, k keys, d head dim,
e value dim.
"""

from __future__ import annotations

import torch
from torch import Tensor


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
    """Attend.

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
