"""Scope of a random draw: its sample, its tokens and its part of the model."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class SequenceShard:
    """Positions of the full sequence in a rank's activation, in local order.

    ranges: [begin, end) pairs of absolute positions; total: length of the full sequence.
    """

    ranges: tuple[tuple[int, int], ...]
    total: int

    @staticmethod
    def full(total: int) -> SequenceShard:
        """Return the shard that holds every position."""
        return SequenceShard(((0, total),), total)

    @staticmethod
    def zigzag(total: int, rank: int, size: int) -> SequenceShard:
        """Return chunks rank and 2 * size - 1 - rank of the 2 * size chunks of a sequence.

        Under a causal mask a query of an early chunk has few keys and a query of a late chunk has
        many; every pair of chunks has the same number. `total` is a multiple of 2 * size.
        """
        if size == 1:
            return SequenceShard.full(total)
        chunk, last = total // (2 * size), 2 * size - 1
        pair = ((i * chunk, (i + 1) * chunk) for i in (rank, last - rank))
        return SequenceShard(tuple(pair), total)

    def index_of(self, position: int) -> int | None:
        """Return the local index of an absolute position; None if another rank holds it."""
        before = 0
        for begin, end in self.ranges:
            if begin <= position < end:
                return before + position - begin
            before += end - begin
        return None

    @property
    def length(self) -> int:
        """Number of positions held."""
        return sum(end - begin for begin, end in self.ranges)

    def positions(self, device: torch.device | None = None) -> Tensor:
        """Return the absolute position of every local token, int64 [length]."""
        parts = [torch.arange(begin, end, device=device) for begin, end in self.ranges]
        return parts[0] if len(parts) == 1 else torch.cat(parts)

    def shard(self, rank: int, size: int) -> SequenceShard:
        """Return the rank-th of `size` equal consecutive pieces (sequence parallelism)."""
        length = self.length // size
        return self if size == 1 else self.run(rank * length, (rank + 1) * length)

    def run(self, first: int, last: int) -> SequenceShard:
        """Return the shard of the local tokens [first, last)."""
        skip, need, kept = first, last - first, []
        for begin, end in self.ranges:
            if skip >= end - begin:
                skip -= end - begin
                continue
            taken = min(end - begin - skip, need)
            kept.append((begin + skip, begin + skip + taken))
            need, skip = need - taken, 0
            if need == 0:
                break
        return SequenceShard(tuple(kept), self.total)

    def blocks(self, max_blocks: int) -> list[tuple[int, int, int, int]]:
        """Cut into fixed blocks: (block, tokens per block, first token in it, tokens used)."""
        count = min(self.total & -self.total, max_blocks)
        rows = self.total // count
        cut = []
        for begin, end in self.ranges:
            while begin < end:
                index, first = divmod(begin, rows)
                used = min(rows - first, end - begin)
                cut.append((index, rows, first, used))
                begin += used
        return cut


@dataclass(frozen=True)
class JoinedSamples:
    """Samples that dynamic context parallelism packs into one micro batch [1, s].

    The tensors are int64 [s], with one entry for each position of the whole sequence; entries of
    padding are arbitrary.

    count: number of samples here; places: index of the position's sample among them; numbers: index
    of that sample in the run; positions: position inside the sample; num_sequences: number of
    sequences packed into the sample.
    """

    count: int
    places: Tensor
    numbers: Tensor
    positions: Tensor
    num_sequences: Tensor


@dataclass(frozen=True)
class RandomScope:
    """Position of the next draw in the computation."""

    first_sample: int = 0
    microbatch: int = 0
    """Index of the micro batch in the step."""
    path: tuple[int | str, ...] = ()
    rows: SequenceShard | None = None
    samples: JoinedSamples | None = None
    """Set if samples are packed; otherwise a micro batch [b, s] has b samples."""
    draw_index: int = 0
    """Number of draws already made in this scope."""
    pass_index: int = 0
    """Number of the pass, from 1, through a layer that every micro batch passes several times; 0
    for other layers."""
    token_range: tuple[int, int, int] | None = None
    """(first, last, number of local tokens) if a module runs on one range of tokens after the
    other."""
