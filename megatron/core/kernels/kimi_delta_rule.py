"""The delta rule with a decay for each channel of a key, in chunks.

Kimi Team, "Kimi Linear: An Expressive, Efficient Attention Architecture", section 3, arXiv
2510.26692: S_t = (I - b_t k_t k_t^T) diag(a_t) S_{t-1} + b_t k_t v_t^T, o_t = S_t^T q_t. The WY
form inside a chunk is that of the gated delta rule; only the products of pairs of rows differ,
whose terms decay each by its own factor.

Legend: as in `gated_delta_rule`.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from megatron.core.kernels.chunks import CHUNK, Cut, DocumentRows, chunk_sight
from megatron.core.kernels.gated_delta_rule import DeltaChunks


def kimi_delta_chunks(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    log_decay: Tensor,
    beta: Tensor,
    documents: DocumentRows | None = None,
    *,
    chunk: int = CHUNK,
) -> DeltaChunks:
    """Cut a sequence into chunks and compute what does not depend on the state before them.

    Args:
        query, key: [s, b, g, d], as they enter the rule (normed, scaled).
        value: [s, b, n, e].
        log_decay: [s, b, n, d], the logarithm of a_t, at most 0.
        beta: [s, b, n], b_t.
        documents: a row sees no state of another document; None is one document.
        chunk: rows of a chunk, a power of 2; a shorter sequence is one chunk.
    """
    s, _, g, _ = key.shape
    cut = Cut(s, min(chunk, 1 << (s - 1).bit_length()), g)
    query, key, value, beta = cut(query), cut(key), cut(value), cut(beta).unsqueeze(-1)
    decay = cut(log_decay)
    scores, system = decayed_products(torch.stack((query, key)), key, decay)
    since_start, until_end = decay.cumsum(-2).exp(), _sums_after(decay).exp()
    keep = since_start[..., -1:, :].mT
    if documents is not None:
        sight = chunk_sight(documents, cut)
        scores, system = scores * sight.between, system * sight.between
        since_start, until_end = since_start * sight.since_start, until_end * sight.until_end
        keep = keep * sight.keep
    right = torch.cat((beta * value, beta * since_start * key), -1)
    solved = torch.linalg.solve_triangular(beta * system, right, upper=False, unitriangular=True)
    values, reads = solved.split([value.shape[-1], key.shape[-1]], -1)
    return DeltaChunks(
        queries=since_start * query,
        scores=scores,
        values=values,
        reads=reads,
        keys=until_end * key,
        keep=keep,
        cut=cut,
    )


def decayed_products(left: Tensor, right: Tensor, log_decay: Tensor) -> Tensor:
    """Return P_ij = sum_d left_id right_jd exp(sum of log_decay_md over j < m <= i), 0 for j > i.

    Blocks double from single rows on. Of the two halves of a block the later rows decay since the
    boundary and the earlier ones until it: factors are at most 1 and sums are each their own, not
    differences of sums that grow, and no tensor has rows, rows and channels.

    Args:
        left, right, log_decay: [..., l, d], of shapes that broadcast; l is a power of 2.
    Returns:
        [..., l, l].
    """
    length = log_decay.shape[-2]
    products = (left * right).sum(-1)
    shape = torch.broadcast_shapes(products.shape, log_decay.shape[:-1])
    products = products.expand(shape).unflatten(-1, (length, 1, 1))
    size = 1
    while size < length:
        halves = (-1, 2, size)
        decays = log_decay.unflatten(-2, halves)
        earlier = right.unflatten(-2, halves).select(-3, 0)
        earlier = earlier * _sums_after(decays.select(-3, 0)).exp()
        later = left.unflatten(-2, halves).select(-3, 1)
        later = later * decays.select(-3, 1).cumsum(-2).exp()
        first, second = products.unflatten(-3, (-1, 2)).unbind(-3)
        upper = torch.cat((first, torch.zeros_like(first)), -1)
        products = torch.cat((upper, torch.cat((later @ earlier.mT, second), -1)), -2)
        size *= 2
    return products.squeeze(-3)


def _sums_after(x: Tensor) -> Tensor:
    """Return for each row of [..., l, d] the sum of the rows after it."""
    return F.pad(x, (0, 0, 0, 1))[..., 1:, :].flip(-2).cumsum(-2).flip(-2)
