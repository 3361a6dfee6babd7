"""The state-space dual recurrence, in chunks: S_t = a_t S_{t-1} + k_t v_t^T, y_t = S_t^T q_t.

T. Dao, A. Gu, "Transformers are SSMs: Generalized Models and Efficient Algorithms Through
Structured State Space Duality", section 6 (the block decomposition of SSD), arXiv 2405.21060, whose
B, C and X are keys k, queries q and values v here. The decay of a head is a number, so a chunk only
multiplies the state by its decay and adds its own term.

Legend: s rows, b micro batch, g groups, n heads, r = n/g of them to a group, d width of the state
(keys and queries), e of a head, c chunks, l rows of a chunk. A state is [b, g, d, r, e].
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from megatron.core.kernels.chunks import CHUNK, Cut, DocumentRows, chunk_decays


@dataclass(frozen=True)
class StateSpaceChunks:
    """A sequence cut into chunks, with everything computed that does not need the states.

    With S the state before a chunk, its output is `inside` + `since_start` * `queries` @ S, and S
    becomes `keep` * S + `terms`.
    """

    inside: Tensor
    """[b, g, c, l, r, e]."""
    since_start: Tensor
    """[b, g, c, l, r, 1], decays since the chunk began."""
    queries: Tensor
    """[b, g, c, l, d]."""
    terms: Tensor
    """[b, g, c, d, r, e]."""
    keep: Tensor
    """[b, g, c, 1, r, 1], the decay of a whole chunk; 0 where a document begins inside it."""
    cut: Cut

    def run(self, state: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """Return the outputs [s, b, n, e] and the state after the last row.

        Args:
            state: [b, g, d, r, e] before the first row; None is zero.
        """
        if state is None:
            state = torch.zeros_like(self.terms[:, :, 0])
        before = []
        for keep, term in zip(self.keep.unbind(2), self.terms.unbind(2), strict=True):
            before.append(state)
            state = keep * state + term
        read = self.queries @ torch.stack(before, 2).flatten(4)
        out = self.inside + self.since_start * read.view_as(self.inside)
        return self.cut.restore(out.movedim(4, 2)), state

    def transition(self) -> Tensor:
        """Return the decay of all chunks together, and their state after a state of zeros.

        Returns:
            [b, g, 1 + d, r, e], the decay before the rows of the state.
        """
        decay = torch.ones_like(self.terms[:, :, 0, :1])
        joined = torch.cat((decay, torch.zeros_like(self.terms[:, :, 0])), 2)
        for keep, term in zip(self.keep.unbind(2), self.terms.unbind(2), strict=True):
            joined = keep * joined + torch.cat((torch.zeros_like(decay), term), 2)
        return joined

    @staticmethod
    def after(transition: Tensor, state: Tensor | None) -> Tensor:
        """Return the state [b, g, d, r, e] after all chunks."""
        term = transition[:, :, 1:]
        return term if state is None else transition[:, :, :1] * state + term


def state_space_chunks(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    log_decay: Tensor,
    documents: DocumentRows | None = None,
    *,
    chunk: int = CHUNK,
) -> StateSpaceChunks:
    """Cut a sequence into chunks and compute everything that does not need the states.

    Args:
        query, key: [s, b, g, d], C and B of the paper.
        value: [s, b, n, e], X of the paper times the step size.
        log_decay: [s, b, n], the logarithm of a_t, at most 0.
        documents: a row sees no state of another document; None is one document.
        chunk: rows of a chunk; a shorter sequence is one chunk.
    """
    cut = Cut(len(key), min(chunk, len(key)), key.shape[2])
    query, key, value = cut(query)[:, :, 0], cut(key)[:, :, 0], cut(value)
    decays = chunk_decays(cut(log_decay), documents, cut)
    # The heads of a group have the same products of queries and keys, and read and write them side
    # by side: a product for each group, not for each head.
    scores = (query @ key.mT).unsqueeze(2) * decays.between
    kept = (decays.until_end * value).movedim(2, 4)
    return StateSpaceChunks(
        inside=(scores @ value).movedim(2, 4),
        since_start=decays.since_start.movedim(2, 4),
        queries=query,
        terms=(key.mT @ kept.flatten(4)).unflatten(4, kept.shape[4:]),
        keep=decays.keep.movedim(2, 4),
        cut=cut,
    )
