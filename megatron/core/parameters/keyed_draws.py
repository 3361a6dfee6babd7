"""Masks of dropout and uniform numbers that do not depend on the layout.

On the CPU masks consist of fixed blocks (a sample, a range of rows, optionally a head), each filled
by the native generator at full speed. In the usual sizes every rank owns whole blocks; otherwise
whole blocks are generated and cut. On accelerators, whose kernels draw while they compute, each
number is a function of its place (`counter_random`).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from megatron.core.foundation.device import computes_in_kernels
from megatron.core.parameters.counter_random import (
    keep_threshold,
    keyed_word_blocks,
    unit_interval,
)
from megatron.core.parameters.rng import SeededGenerators, derive_seed, rng_state
from megatron.core.step_context.random_scope import JoinedSamples, SequenceShard

MAX_ROW_BLOCKS = 64
"""Maximal number of blocks of the tokens of one sample: enough for tp * cp * 2 <= 64."""
MAX_ATTENTION_ROW_BLOCKS = 16
"""Maximal number of blocks of the queries of an attention matrix, which only context parallelism
splits."""
MAX_ATTENTION_BLOCK_ELEMENTS = 2**20
"""Blocks of an attention matrix hold whole rows; longer sequences are cut into more of them, so
that a block's memory does not grow with the square of the length."""


def draws_by_counter(device: torch.device) -> bool:
    """Return whether numbers for `device` are functions of their places, not of blocks."""
    return computes_in_kernels(device) or rng_state().counts_on_cpu


@dataclass(frozen=True)
class ActivationDraw:
    """The places of the numbers of one draw for activations [rows, b, ...].

    A kernel that draws its own numbers uses `counter_random` at (`seed`, position of the row,
    sample, column), with columns counted over all dimensions after b.

    rows: positions of the activations.
    samples: the samples that are packed there, if there are several.
    """

    key: tuple[int | str, ...]
    first_sample: int
    rows: SequenceShard
    samples: JoinedSamples | None = None

    @staticmethod
    def next(x: Tensor, rows: SequenceShard | None) -> ActivationDraw:
        """Take the next draw, for x [rows, b, ...]; rows None is x as the whole sequence."""
        state = rng_state()
        if rows is None or rows.length != x.shape[0]:
            rows = SequenceShard.full(x.shape[0])
        return ActivationDraw(state.next_key(), state.first_sample, rows, state.scope.samples)

    @property
    def seed(self) -> int:
        """The seed of `counter_random`."""
        return derive_seed(*self.key)

    def by_blocks(self, x: Tensor, draw: Callable[[Tensor, torch.Generator], None]) -> Tensor:
        """Fill a tensor shaped like x [rows, b, ...] block by block, each from its own seed."""
        drawn = torch.empty(x.shape, dtype=x.dtype, device=x.device)
        tail = x.shape[2:]
        blocks = self.rows.blocks(MAX_ROW_BLOCKS)
        generators = SeededGenerators(x.device, *self.key)
        for sample in range(x.shape[1]):
            row = 0
            for index, block_rows, first, used in blocks:
                block = torch.empty((block_rows, *tail), dtype=x.dtype, device=x.device)
                draw(block, generators.get(self.first_sample + sample, index))
                drawn[row : row + used, sample] = block[first : first + used]
                row += used
        return drawn

    def by_counter(self, x: Tensor, value_of: Callable[[Tensor], Tensor]) -> Tensor:
        """Fill a tensor shaped like x [rows, b, ...] with a function of the words."""
        drawn = torch.empty(x.shape, dtype=x.dtype, device=x.device)
        flat = drawn.view(*x.shape[:2], -1)
        rows = self.rows.positions(x.device)
        joined = self.samples
        for sample in range(x.shape[1]):
            absolute: int | Tensor = self.first_sample + sample
            if joined is not None:
                absolute, rows = (
                    each.to(x.device)[rows] for each in (joined.numbers, joined.positions)
                )
            for part, words in keyed_word_blocks(self.seed, rows, flat.shape[2], sample=absolute):
                flat[part, sample] = value_of(words).to(x.dtype)
        return drawn


def keyed_keep_mask(x: Tensor, keep_probability: float) -> Tensor:
    """Draw a keep mask for activations x [rows, b, ...]: 1 where kept, 0 where dropped.

    Keyed by (seed, scope, call, sample, row), on the CPU by block of rows. Positions are taken from
    the `SequenceShard` of the current scope; without one, dimension 0 is the whole sequence.
    """
    drawn = ActivationDraw.next(x, rng_state().scope.rows)
    if draws_by_counter(x.device):
        threshold = keep_threshold(keep_probability)
        return drawn.by_counter(x, lambda words: words < threshold)

    def draw(block: Tensor, generator: torch.Generator) -> None:
        block.bernoulli_(keep_probability, generator=generator)

    return drawn.by_blocks(x, draw)


def keyed_uniform(x: Tensor, rows: SequenceShard | None) -> Tensor:
    """Draw uniform numbers in [0, 1) shaped like activations x [rows, b, ...].

    Keyed by the position of a token in its own sample: padding and other packed samples make no
    difference.

    Args:
        rows: positions of `x`.
    """
    return ActivationDraw.next(x, rows).by_counter(x, unit_interval)


@dataclass(frozen=True)
class AttentionKeepMask:
    """A keep mask of attention probabilities that is drawn piece by piece, at any time.

    Keyed by (seed, scope, call, sample, global head, query row), on the CPU by block of rows. A
    kernel that never holds the whole matrix draws one piece at a time, in forward and again in
    backward; a kernel that draws its own numbers uses `counter_random` at (`seed`, row, sample,
    head, key).

    num_keys: length of the whole sequence, also if a rank holds a part of the keys.
    """

    key: tuple[int | str, ...]
    first_sample: int
    keep_probability: float
    num_keys: int

    @staticmethod
    def next(keep_probability: float, num_keys: int) -> AttentionKeepMask:
        """Take the next draw at the current place of the computation."""
        state = rng_state()
        return AttentionKeepMask(state.next_key(), state.first_sample, keep_probability, num_keys)

    @property
    def seed(self) -> int:
        """The seed of `counter_random`."""
        return derive_seed(*self.key)

    def max_blocks(self, num_queries: int) -> int:
        """Return the maximal number of blocks of the queries of a sequence."""
        max_blocks = MAX_ATTENTION_ROW_BLOCKS
        while num_queries * self.num_keys > max_blocks * MAX_ATTENTION_BLOCK_ELEMENTS:
            max_blocks *= 2
        return max_blocks

    def draw(
        self, sample: int, head: int, rows: SequenceShard, dtype: torch.dtype, device: torch.device
    ) -> Tensor:
        """Return [rows, num_keys], 1 where kept, 0 where dropped.

        Args:
            sample: index in the micro batch; head: index in the whole model.
        """
        if draws_by_counter(device):
            return self._by_counter(self.first_sample + sample, head, rows.positions(device), dtype)
        pieces = []
        generators = SeededGenerators(device, *self.key, self.first_sample + sample, head)
        for index, block_rows, first, used in rows.blocks(self.max_blocks(rows.total)):
            block = torch.empty((block_rows, self.num_keys), dtype=dtype, device=device)
            block.bernoulli_(self.keep_probability, generator=generators.get(index))
            pieces.append(block[first : first + used])
        return pieces[0] if len(pieces) == 1 else torch.cat(pieces)

    def _by_counter(self, sample: int, head: int, rows: Tensor, dtype: torch.dtype) -> Tensor:
        mask = torch.empty((len(rows), self.num_keys), dtype=dtype, device=rows.device)
        threshold = keep_threshold(self.keep_probability)
        for part, words in keyed_word_blocks(
            self.seed, rows, self.num_keys, sample=sample, head=head
        ):
            mask[part] = (words < threshold).to(dtype)
        return mask


def keyed_attention_keep_mask(
    shape: tuple[int, int, int, int],
    keep_probability: float,
    *,
    first_head: int,
    query_rows: SequenceShard | None = None,
    dtype: torch.dtype,
    device: torch.device,
) -> Tensor:
    """Draw a whole keep mask for attention probabilities [b, n/tp, sq, sk].

    Args:
        first_head: global index of the first local head.
    """
    batch, heads, num_queries, num_keys = shape
    rows = query_rows or SequenceShard.full(num_queries)
    draws = AttentionKeepMask.next(keep_probability, num_keys)
    mask = torch.empty(shape, dtype=dtype, device=device)
    for sample in range(batch):
        for head in range(heads):
            mask[sample, head] = draws.draw(sample, first_head + head, rows, dtype, device)
    return mask


def keyed_dropout(x: Tensor, probability: float, training: bool = True) -> Tensor:
    """Drop activations x [rows, b, ...] with `probability`, independent of the layout.

    It replaces `torch.nn.functional.dropout` inside a model: the dropped elements of a sample,
    layer and position are the same for all parallel sizes.
    """
    if not training or probability == 0.0:
        return x
    keep = 1.0 - probability
    return x * keyed_keep_mask(x, keep).div_(keep)
