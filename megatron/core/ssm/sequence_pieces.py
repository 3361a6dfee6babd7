"""The pieces of a sequence on one context-parallel rank, for recurrent mixers.

Legend: s tokens of this rank, b micro batch, c channels, p pieces of this rank (2, or 1 without
context parallelism), which are first in the batch: [p*b].
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
    """The pieces of the sequence on this rank, and the tokens and states before them.

    Args:
        cp: context-parallel group.
    """

    def __init__(self, cp: Group) -> None:
        self.cp = cp
        self.is_split = cp.size() > 1
        self.mine = [cp.rank(), 2 * cp.size() - 1 - cp.rank()] if self.is_split else [0]

    def fold(self, x: Tensor) -> Tensor:
        """Stack this rank's pieces in the batch: [s, b, ...] -> [s/p, p*b, ...]."""
        return torch.cat(x.chunk(2), 1) if self.is_split else x

    def unfold(self, x: Tensor) -> Tensor:
        """Undo `fold`: [s/p, p*b, ...] -> [s, b, ...]."""
        return torch.cat(x.chunk(2, 1)) if self.is_split else x

    def documents(self, packed: PackedSeqParams | None, x: Tensor, history: int) -> Tensor | None:
        """Return the document of each token of `x` and of the tokens before it.

        Args:
            x: [s/p, p*b, ...].
            history: number of tokens before, at least one. Before the start of the sequence they
                belong to the document of the first token.
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
        """Return the `count` tokens before each piece, zeros before the sequence.

        Args:
            x: [s/p, p*b, c].
        Returns:
            [count, p*b, c]; None without context parallelism.
        Communication:
            forward all-gather of min(count, s/p) tokens per piece, backward reduce-scatter, on
            `cp`.
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
            chunks: recurrence over this rank's pieces, [p*b, ...].
        Returns:
            [p*b, ...].
        Communication:
            forward all-gather of the state map of each piece, backward reduce-scatter, on `cp`.
        """
        pieces = self._of_all_ranks(chunks.transition())
        states = [torch.zeros_like(chunks.after(pieces[0], None))]
        for piece in pieces[: self.mine[-1]]:
            states.append(chunks.after(piece, states[-1]))
        return torch.cat([states[piece] for piece in self.mine])

    def _of_all_ranks(self, x: Tensor) -> Sequence[Tensor]:
        """Gather [p*b, ...]; return the pieces of all ranks, [b, ...], in sequence order."""
        split = x.unflatten(0, (len(self.mine), -1))
        gathered = gather_from_sequence_parallel_region(split.contiguous(), group=self.cp)
        return [*gathered[0::2].unbind(), *gathered[1::2].flip(0).unbind()]
