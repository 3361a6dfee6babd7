"""Random numbers as a function of their place, without state, order or blocks.

Philox 4x32-10 (J. Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", SC11, section 3.3)
scrambles a counter of four 32-bit words under a key of two. Here the counter is the place of a
number (columns, row, head, sample) and the key is the seed of the draw, so any part of a mask can
be computed anywhere: by a rank that holds some tokens or heads, or inside a kernel, in forward and
again in backward. `megatron.core.kernels.triton_kernels.keyed` computes the same words in
registers.

One call gives the words of `WORDS` adjacent columns. torch has no unsigned 32-bit arithmetic: words
are int64 in [0, 2^32), and products wrap, which leaves their low 64 bits right.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

WORDS = 4
"""Numbers of one call, for the columns 4c ... 4c + 3."""
WORD_BITS = 32
_LOW = 0xFFFFFFFF
_MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
_KEY_STEPS = (0x9E3779B9, 0xBB67AE85)
_ROUNDS = 10
_MAX_ELEMENTS = 2**20
"""Numbers computed at a time: several tensors of 8-byte words exist at once."""


def philox(counter: tuple[Tensor, ...], key: tuple[int, int]) -> tuple[Tensor, ...]:
    """Return four words for each counter.

    Args:
        counter: four int64 tensors [n] in [0, 2^32), or of other shapes that broadcast.
        key: two words.
    Returns:
        four int64 tensors in [0, 2^32), [n] or of the broadcast shape.
    """
    c0, c1, c2, c3 = counter
    k0, k1 = key
    for _ in range(_ROUNDS):
        first, second = c0 * _MULTIPLIERS[0], c2 * _MULTIPLIERS[1]
        c0, c2 = _high(second) ^ c1 ^ k0, _high(first) ^ c3 ^ k1
        c1, c3 = second & _LOW, first & _LOW
        k0, k1 = (k0 + _KEY_STEPS[0]) & _LOW, (k1 + _KEY_STEPS[1]) & _LOW
    return c0, c1, c2, c3


def _high(product: Tensor) -> Tensor:
    """Return the upper word of products that may have wrapped to negative numbers."""
    return (product >> WORD_BITS) & _LOW


def keyed_words(
    seed: int, rows: Tensor, num_columns: int, *, sample: int | Tensor, head: int = 0
) -> Tensor:
    """Return the words of places (row, column), int64 [rows, num_columns] in [0, 2^32).

    Args:
        seed: seed of the draw.
        rows: int64 [rows], absolute positions in the sequence.
        sample: absolute index of the sample (its low 32 bits are used), or int64 [rows] with the
            sample of each row.
        head: index in the whole model.
    """
    calls = torch.arange(-(-num_columns // WORDS), device=rows.device)
    samples = torch.as_tensor(sample, device=rows.device).view(-1, 1) & _LOW
    counter = (calls, rows.unsqueeze(1), calls.new_tensor(head), samples)
    key = seed & _LOW, seed >> WORD_BITS & _LOW
    words = torch.stack(philox(counter, key), -1)
    return words.flatten(1)[:, :num_columns]


def keyed_word_blocks(
    seed: int, rows: Tensor, num_columns: int, *, sample: int | Tensor, head: int = 0
) -> Iterator[tuple[slice, Tensor]]:
    """Yield (slice of the rows, their `keyed_words` [r, num_columns]) in blocks of bounded size."""
    step = max(1, _MAX_ELEMENTS // max(num_columns, 1))
    for begin in range(0, len(rows), step):
        part = slice(begin, min(begin + step, len(rows)))
        own = sample[part] if isinstance(sample, Tensor) else sample
        yield part, keyed_words(seed, rows[part], num_columns, sample=own, head=head)


def keep_threshold(keep_probability: float) -> int:
    """Return the bound below which a word means "kept": the probability in units of 2^-32."""
    return min(round(keep_probability * 2**WORD_BITS), _LOW)


def unit_interval(words: Tensor) -> Tensor:
    """Turn words [n] of any shape into fp32 numbers in [0, 1): their upper 24 bits, exactly."""
    return (words >> 8).to(torch.float32).mul_(2.0**-24)
