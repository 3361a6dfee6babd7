"""Chunks and decays, shared by the recurrences that are computed in chunks.

A state decays by a factor for each row and head. Inside a chunk all pairs of rows are computed by
products; only the state passes from one chunk to the next. States and everything in log space are
fp32 (fp64 for fp64 inputs), whatever the dtype of the activations.

Legend: s rows, b micro batch, g groups of heads that share keys, n heads, r = n/g, c chunks, l rows
of a chunk.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

CHUNK = 64
"""Rows of a chunk: the work inside a chunk grows with its square, the number of steps shrinks."""


@dataclass(frozen=True)
class DocumentRows:
    """Which document each row belongs to; a state ends with its document.

    Attributes:
        ids: [b, s].
        before: [b], document of the row before the first row: the given state belongs to it.
    """

    ids: Tensor
    before: Tensor


class Chunks(Protocol):
    """A sequence cut into chunks, with everything computed that does not need the states."""

    def run(self, state: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """Return the outputs [s, b, n, e] and the state after the last row.

        Args:
            state: [b, ...] before the first row; None is zero.
        """
        ...

    def transition(self) -> Tensor:
        """Return the effect of all chunks together on a state, [b, ...], for `after`."""
        ...

    @staticmethod
    def after(transition: Tensor, state: Tensor | None) -> Tensor:
        """Apply `transition` [b, ...] to a state [b, ...]; None is zero."""
        ...


@dataclass(frozen=True)
class Cut:
    """How a sequence is cut into chunks; a shorter sequence is one chunk.

    Attributes:
        num_rows: s.
        length: l.
        num_groups: g.
    """

    num_rows: int
    length: int
    num_groups: int

    @property
    def pad(self) -> int:
        """Rows that fill the last chunk."""
        return -self.num_rows % self.length

    def __call__(self, x: Tensor) -> Tensor:
        """Cut [s, b, heads, ...] into [b, g, heads/g, c, l, ...], fp32 or wider.

        Rows that fill the last chunk are 0.
        """
        x = x.to(torch.promote_types(x.dtype, torch.float32))
        x = F.pad(x.movedim(0, -1), (0, self.pad)).movedim(-1, 1)
        shape = (x.shape[0], -1, self.length, self.num_groups, x.shape[2] // self.num_groups)
        return x.reshape(*shape, *x.shape[3:]).movedim((3, 4), (1, 2))

    def restore(self, x: Tensor) -> Tensor:
        """Return the rows [s, b, n, ...] of chunks [b, g, r, c, l, ...]."""
        rows = x.flatten(3, 4)[:, :, :, : self.num_rows]
        return rows.movedim(3, 0).flatten(2, 3)


@dataclass(frozen=True)
class ChunkSight:
    """Whether both rows of `ChunkDecays` are of one document: [b, 1, 1, c, ...]."""

    since_start: Tensor
    until_end: Tensor
    between: Tensor
    keep: Tensor


def chunk_sight(documents: DocumentRows, cut: Cut) -> ChunkSight:
    """Return which rows share a document; padding rows belong to the last document."""
    ids = torch.cat((documents.ids, documents.ids[:, -1:].expand(-1, cut.pad)), 1)
    ids = ids.view(len(ids), 1, 1, -1, cut.length)
    before = documents.before.view(-1, 1, 1, 1)
    before = torch.cat((before, ids[..., :-1, -1]), -1).unsqueeze(-1)
    return ChunkSight(
        since_start=(ids == before).unsqueeze(-1),
        until_end=(ids == ids[..., -1:]).unsqueeze(-1),
        between=ids.unsqueeze(-1) == ids.unsqueeze(-2),
        keep=(ids[..., -1:] == before).unsqueeze(-1),
    )


@dataclass(frozen=True)
class ChunkDecays:
    """Products of decays inside chunks, 0 from one document to another: [b, g, r, c, ...]."""

    since_start: Tensor
    """[.., l, 1], from the state before the chunk to a row."""
    until_end: Tensor
    """[.., l, 1], from a row to the state after the chunk."""
    between: Tensor
    """[.., l, l], from a row (last dimension) to itself and to each later row."""
    keep: Tensor
    """[.., 1, 1], over the whole chunk."""

    def seen(self, sight: ChunkSight) -> ChunkDecays:
        """Return the same, 0 from one document to another."""
        return ChunkDecays(
            self.since_start * sight.since_start,
            self.until_end * sight.until_end,
            self.between * sight.between,
            self.keep * sight.keep,
        )


def chunk_decays(log_decay: Tensor, documents: DocumentRows | None, cut: Cut) -> ChunkDecays:
    """Return the products of decays.

    Args:
        log_decay: [b, g, r, c, l], the logarithm of each row's decay, at most 0.
        documents: None is one document.
    Returns:
        [b, g, r, c, ...] each.
    """
    length = cut.length
    since_start = log_decay.cumsum(-1)
    hidden = torch.ones(length, length, dtype=torch.bool, device=log_decay.device).triu(1)
    # Compute each sum separately, not as a difference of two sums since the start of the chunk:
    # these sums grow with the chunk, and rounding would dominate their differences and gradients.
    between = log_decay.unsqueeze(-1).masked_fill(hidden.mT.logical_not(), 0).cumsum(-2)
    until_end = between[..., -1, :].exp().unsqueeze(-1)
    keep = since_start[..., -1, None, None].exp()
    since_start = since_start.exp().unsqueeze(-1)
    between = between.exp().masked_fill(hidden, 0)
    decays = ChunkDecays(since_start, until_end, between, keep)
    return decays if documents is None else decays.seen(chunk_sight(documents, cut))
