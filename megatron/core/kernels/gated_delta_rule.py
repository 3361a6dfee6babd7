"""The gated delta rule, in chunks: S_t = a_t S_{t-1} (I - b_t k_t k_t^T) + b_t v_t k_t^T, o = S q.

S. Yang, J. Kautz, A. Hatamizadeh, "Gated Delta Networks: Improving Mamba2 with Delta Rule",
section 3, arXiv 2412.06464. Inside a chunk the product of the Householder-like factors has the WY
form, whose triangular system is solved once; from chunk to chunk goes only the state. States and
everything in log space are fp32 (fp64 for fp64 inputs), whatever the dtype of the activations.

Legend: s rows, b micro batch, g key heads, n value heads, r = n/g of them to a key head, d width
of a key head, e of a value head, c chunks, l rows of a chunk. A state is [b, g, r, d, e].
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

CHUNK = 64
"""Rows of a chunk: the triangular system grows with its square, the number of steps shrinks."""


@dataclass(frozen=True)
class DocumentRows:
    """Which document each row belongs to; a state ends with its document.

    Attributes:
        ids: [b, s].
        before: [b], of the row before the first, which the given state comes from.
    """

    ids: Tensor
    before: Tensor


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
    """[.., 1, 1], the decay of a whole chunk; 0 where a document begins inside it."""
    num_rows: int

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
        out = torch.stack(outputs, 3).flatten(3, 4)[:, :, :, : self.num_rows]
        return out.permute(3, 0, 1, 2, 4).flatten(2, 3), state

    def transition(self) -> tuple[Tensor, Tensor]:
        """Return what all chunks together do to a state: after = factor @ before + term.

        Returns:
            factor [b, g, r, d, d], term [b, g, r, d, e].
        """
        width = self.values.shape[-1]
        eye = torch.eye(self.keys.shape[-1], dtype=self.keys.dtype, device=self.keys.device)
        joined = torch.cat((eye.expand_as(self._zeros(len(eye))), self._zeros(width)), -1)
        values = F.pad(self.values, (len(eye), 0))
        steps = (part.unbind(3) for part in (values, self.reads, self.keys, self.keep))
        for value, read, key, keep in zip(*steps, strict=True):
            joined = keep * joined + key.mT @ (value - read @ joined)
        factor, term = joined.split([len(eye), width], -1)
        return factor, term

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
    """Cut a sequence into chunks and compute what does not depend on the state before them.

    Args:
        query, key: [s, b, g, d], as they enter the rule (normed, scaled).
        value: [s, b, n, e].
        log_decay, beta: [s, b, n], the logarithm of a_t, at most 0, and b_t.
        documents: a row sees no state of another document; None is one document.
        chunk: rows of a chunk; a shorter sequence is one chunk.
    """
    s, b, g, d = key.shape
    dtype = torch.promote_types(query.dtype, torch.float32)
    length = min(chunk, s)
    pad = -s % length

    def cut(x: Tensor, *tail: int) -> Tensor:
        """[s, b, heads, ...] -> [b, g, r or 1, c, l, ...]; rows that pad it change no state."""
        x = F.pad(x.to(dtype).movedim(0, -1), (0, pad)).movedim(-1, 1)
        return x.reshape(b, -1, length, g, x.shape[2] // g, *tail).movedim((3, 4), (1, 2))

    query, key, value = cut(query, d), cut(key, d), cut(value, value.shape[-1])
    log_decay, beta = cut(log_decay), cut(beta).unsqueeze(-1)
    since_start = log_decay.cumsum(-1)
    hidden = torch.ones(length, length, dtype=torch.bool, device=key.device).triu(1)
    # Each sum of its own, not the difference of two since the start: those grow with the chunk, and
    # neighbours would differ by what rounding leaves of two large numbers, gradients too.
    between = log_decay.unsqueeze(-1).masked_fill(hidden.mT.logical_not(), 0).cumsum(-2)
    until_end = between[..., -1, :].exp().unsqueeze(-1)
    keep = since_start[..., -1, None, None].exp()
    since_start = since_start.exp().unsqueeze(-1)
    if documents is not None:
        ids = torch.cat((documents.ids, documents.ids[:, -1:].expand(-1, pad)), 1)
        ids = ids.view(b, 1, 1, -1, length)
        before = torch.cat((documents.before.view(b, 1, 1, 1), ids[..., :-1, -1]), -1).unsqueeze(-1)
        hidden = hidden | (ids.unsqueeze(-1) != ids.unsqueeze(-2))
        since_start = since_start * (ids == before).unsqueeze(-1)
        until_end = until_end * (ids == ids[..., -1:]).unsqueeze(-1)
        keep = keep * (ids[..., -1:] == before).unsqueeze(-1)
    decays = between.exp().masked_fill(hidden, 0)
    system = beta * (key @ key.mT) * decays
    right = torch.cat((beta * value, beta * since_start * key), -1)
    solved = torch.linalg.solve_triangular(system, right, upper=False, unitriangular=True)
    values, reads = solved.split([value.shape[-1], d], -1)
    return DeltaChunks(
        queries=since_start * query,
        scores=(query @ key.mT) * decays,
        values=values,
        reads=reads,
        keys=until_end * key,
        keep=keep,
        num_rows=s,
    )
