"""Delta rules in chunks: one decay per head (gated), or one per channel of a key (Kimi).

Gated: S_t = a_t S_{t-1} (I - b_t k_t k_t^T) + b_t v_t k_t^T, o = S q. S. Yang, J. Kautz, A.
Hatamizadeh, "Gated Delta Networks: Improving Mamba2 with Delta Rule", section 3, arXiv 2412.06464.

Kimi: S_t = (I - b_t k_t k_t^T) diag(a_t) S_{t-1} + b_t k_t v_t^T, o_t = S_t^T q_t. Kimi Team, "Kimi
Linear: An Expressive, Efficient Attention Architecture", section 3, arXiv 2510.26692. Products of
two tokens decay by a factor per channel.

Inside a chunk the product of the Householder-like factors has the WY form, whose triangular system
is solved once. Only the state passes from one chunk to the next.

Legend: s tokens of a sequence, b micro batch, g key heads, n value heads, r = n/g value heads per
key head, d width of a key head, e of a value head, c chunks, l tokens of a chunk. A state is
[b, g, r, d, e].
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from megatron.core.kernels.chunks import CHUNK, Cut, DocumentRows, chunk_decays, chunk_sight


@dataclass(frozen=True)
class DeltaChunks:
    """A sequence cut into chunks, after the triangular systems are solved: [b, g, r, c, ...].

    With S the state before a chunk, the chunk writes u = `values` - `reads` @ S under its keys; its
    output is `queries` @ S + `scores` @ u, and S becomes `keep` * S + `keys`^T @ u.
    """

    queries: Tensor
    """[.., l, d], decayed since the chunk began."""
    scores: Tensor
    """[.., l, l], lower triangular."""
    values: Tensor
    """[.., l, e]."""
    reads: Tensor
    """[.., l, d]."""
    keys: Tensor
    """[.., l, d], decayed until the chunk ends."""
    keep: Tensor
    """[.., 1, 1], or [.., d, 1] of channels, the decay of a whole chunk; 0 where a document begins
    inside it."""
    cut: Cut

    def run(self, state: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """Return the outputs [s, b, n, e] and the state after the last row.

        Args:
            state: [b, g, r, d, e] before the first row; None is zero.
        """
        if state is None:
            state = self._zeros(self.values.shape[-1])
        outputs = []
        steps = zip(
            *(part.unbind(3) for part in (self.queries, self.scores, self.values, self.reads)),
            *(part.unbind(3) for part in (self.keys, self.keep)),
            strict=True,
        )
        for query, scores, value, read, key, keep in steps:
            written = value - read @ state
            outputs.append(query @ state + scores @ written)
            state = keep * state + key.mT @ written
        return self.cut.restore(torch.stack(outputs, 3)), state

    def transition(self) -> Tensor:
        """Return the effect of all chunks on a state: after = factor @ before + term.

        Returns:
            [b, g, r, d, d + e], the factor and then the term.
        """
        width = self.values.shape[-1]
        eye = torch.eye(self.keys.shape[-1], dtype=self.keys.dtype, device=self.keys.device)
        joined = torch.cat((eye.expand_as(self._zeros(len(eye))), self._zeros(width)), -1)
        values = F.pad(self.values, (len(eye), 0))
        steps = (part.unbind(3) for part in (values, self.reads, self.keys, self.keep))
        for value, read, key, keep in zip(*steps, strict=True):
            joined = keep * joined + key.mT @ (value - read @ joined)
        return joined

    @staticmethod
    def after(transition: Tensor, state: Tensor | None) -> Tensor:
        """Return the state [b, g, r, d, e] after all chunks."""
        d = transition.shape[-2]
        term = transition[..., d:]
        return term if state is None else transition[..., :d] @ state + term

    def _zeros(self, width: int) -> Tensor:
        return self.keys.new_zeros((*self.keys.shape[:3], self.keys.shape[-1], width))


def delta_chunks(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    log_decay: Tensor,
    beta: Tensor,
    documents: DocumentRows | None = None,
    *,
    chunk: int = CHUNK,
) -> DeltaChunks:
    """Cut a sequence into chunks and compute everything that does not need the states.

    Args:
        query, key: [s, b, g, d], as they enter the rule (normed, scaled).
        value: [s, b, n, e].
        log_decay, beta: [s, b, n], the logarithm of a_t, at most 0, and b_t.
        documents: a row sees no state of another document; None is one document.
        chunk: rows of a chunk; a shorter sequence is one chunk.
    """
    s, _, g, d = key.shape
    cut = Cut(s, min(chunk, s), g)
    query, key, value, beta = cut(query), cut(key), cut(value), cut(beta).unsqueeze(-1)
    decays = chunk_decays(cut(log_decay), documents, cut)
    system = beta * (key @ key.mT) * decays.between
    right = torch.cat((beta * value, beta * decays.since_start * key), -1)
    solved = torch.linalg.solve_triangular(system, right, upper=False, unitriangular=True)
    values, reads = solved.split([value.shape[-1], d], -1)
    return DeltaChunks(
        queries=decays.since_start * query,
        scores=(query @ key.mT) * decays.between,
        values=values,
        reads=reads,
        keys=decays.until_end * key,
        keep=decays.keep,
        cut=cut,
    )


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
    """Cut a sequence into chunks and compute everything that does not need the states.

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

    Blocks double in size, starting from single rows. In a block the later half decays from the
    boundary of the halves on, and the earlier half up to it. So all factors are at most 1, no sum
    is a difference of growing sums, and no tensor has the size rows * rows * channels.

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
