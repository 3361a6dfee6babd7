"""Recurrences over a sequence that is split over context-parallel ranks.

A rank holds two pieces of the sequence (`megatron.core.context_parallel.partition`). They lie side
by side in the batch, so that both are computed at once, each from what is before it: a few rows for
a convolution, and a state. What a piece does to a state is a linear map. Ranks gather these maps of
all pieces, whose bytes do not depend on the length of the sequence, and compose them.

Legend: s rows of this rank, b micro batch, p pieces of this rank (2, or 1 on a single rank), which
are first in the batch: [p*b].
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from megatron.core.kernels.chunks import Chunks
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.tensor_parallel.mappings import gather_from_sequence_parallel_region
from megatron.core.topology.group import Group


class SequencePieces:
    """Which pieces of the sequence this rank holds, and what is before each of them.

    Args:
        cp: context-parallel group.
    """

    def __init__(self, cp: Group) -> None:
        self.cp = cp
        self.is_split = cp.size() > 1
        self.mine = [cp.rank(), 2 * cp.size() - 1 - cp.rank()] if self.is_split else [0]

    def fold(self, x: Tensor) -> Tensor:
        """Put this rank's pieces side by side: [s, b, ...] -> [s/p, p*b, ...]."""
        return torch.cat(x.chunk(2), 1) if self.is_split else x

    def unfold(self, x: Tensor) -> Tensor:
        """Undo `fold`: [s/p, p*b, ...] -> [s, b, ...]."""
        return torch.cat(x.chunk(2, 1)) if self.is_split else x

    def documents(self, packed: PackedSeqParams | None, x: Tensor, history: int) -> Tensor | None:
        """Return the document of each row of `x` and of the rows before it.

        Args:
            x: [s/p, p*b, ...].
            history: rows before, at least one. Before the first row of the sequence they belong
                to its document.
        Returns:
            [p*b, history + s/p]; None if there is one document.
        """
        if packed is None:
            return None
        rows, batch = x.shape[0], x.shape[1] // len(self.mine)
        num_pieces = 2 * self.cp.size() if self.is_split else 1
        ids = packed.resolve(batch, rows * num_pieces, x.device).ids
        ids = torch.cat((ids[:, :1].expand(-1, history), ids), 1)
        return torch.cat([ids[:, piece * rows :][:, : history + rows] for piece in self.mine])

    def rows_before(self, x: Tensor, count: int) -> Tensor | None:
        """Return the `count` rows before each piece, zeros before the sequence.

        Args:
            x: [s/p, p*b, c].
        Returns:
            [count, p*b, c]; None where one piece is all, before which there is nothing.
        Communication:
            forward all-gather of min(count, s/p) rows a piece, backward reduce-scatter, on `cp`.
        """
        if not (self.is_split and count):
            return None
        last = x[max(0, len(x) - count) :].transpose(0, 1)
        pieces = self._of_all_ranks(last)
        before = []
        for piece in self.mine:
            nothing = last.new_zeros((pieces[0].shape[0], count, x.shape[2]))
            before.append(torch.cat((nothing, *pieces[:piece]), 1)[:, -count:])
        return torch.cat(before).transpose(0, 1)

    def states_before(self, chunks: Chunks) -> Tensor:
        """Return the state before each piece; it is zero before the sequence.

        Args:
            chunks: of this rank's pieces, [p*b, ...].
        Returns:
            [p*b, ...].
        Communication:
            forward all-gather of what the pieces do to a state, backward reduce-scatter, on `cp`.
        """
        pieces = self._of_all_ranks(chunks.transition())
        states = [torch.zeros_like(chunks.after(pieces[0], None))]
        for piece in pieces[: self.mine[-1]]:
            states.append(chunks.after(piece, states[-1]))
        return torch.cat([states[piece] for piece in self.mine])

    def _of_all_ranks(self, x: Tensor) -> Sequence[Tensor]:
        """Gather [p*b, ...]; return the pieces of all ranks, [b, ...], in the sequence's order."""
        split = x.unflatten(0, (len(self.mine), -1))
        gathered = gather_from_sequence_parallel_region(split.contiguous(), group=self.cp)
        return [*gathered[0::2].unbind(), *gathered[1::2].flip(0).unbind()]
