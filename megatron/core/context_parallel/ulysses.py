"""Trade positions for heads and back, by all-to-all.

S. A. Jacobs et al., "DeepSpeed Ulysses: System Optimizations for Enabling Training of Extreme
Long Sequence Transformer Models", section 3, arXiv 2309.14509. Key heads that are too few to be
split are sent to every rank whose query heads use them.

Legend: s sequence of the ranks of the group together, b micro batch, n heads, d head width, u size
of the group.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from megatron.core.context_parallel.partition import join_zigzag, split_zigzag
from megatron.core.foundation.errors import ConfigError
from megatron.core.topology.group import Group
from megatron.core.transport import collectives


def key_heads_for_ranks(num_heads: int, num_key_heads: int, num_ranks: int) -> list[int] | None:
    """Return the key heads to send, in rank order with repeats; None sends each once.

    Rank i gets query heads i*n/u ... and an equal share of the list, in which again a run of
    query heads shares a key head.

    Raises:
        ConfigError: the query heads do not divide.
    """
    if num_heads % num_ranks:
        raise ConfigError(
            f"{num_heads} query heads cannot be exchanged between {num_ranks} ranks.",
            rule="in an all-to-all each context-parallel rank attends with a whole number of the"
            " query heads of its tensor-parallel rank",
            flags=["--cp-comm-type", "--num-attention-heads", "--tensor-model-parallel-size"],
            fix="use --cp-comm-type p2p, or a number of heads that divides by tensor- times"
            " context-parallel size",
        )
    if num_key_heads % num_ranks == 0:
        return None
    per_key = num_heads // num_key_heads
    if num_ranks % num_key_heads == 0:
        return [rank * num_key_heads // num_ranks for rank in range(num_ranks)]
    return [head // per_key for head in range(num_heads)]


def heads_to_sequence(parts: Sequence[Tensor], group: Group) -> list[Tensor]:
    """Give up positions for heads: all positions of the group, a u-th of the heads.

    Args:
        parts: tensors [s/u, b, heads, width], each with its own number of heads (divisible by u)
            and width; they travel in one message.
    Returns:
        tensors [s, b, heads/u, width], positions ascending.
    Communication:
        one all-to-all forward and one backward on `group`.
    """
    u = group.size()
    s, b = parts[0].shape[:2]
    by_rank = [part.reshape(s, b, u, -1) for part in parts]
    joined = _HeadsToSequence.apply(torch.cat(by_rank, 3), group)
    pieces = joined.split([part.shape[3] for part in by_rank], 2)
    return [
        piece.reshape(*piece.shape[:2], -1, part.shape[3])
        for piece, part in zip(pieces, parts, strict=True)
    ]


def sequence_to_heads(x: Tensor, group: Group) -> Tensor:
    """Undo it: [s, b, n/u, d] -> [s/u, b, u, n/u * d], heads in rank order."""
    return _SequenceToHeads.apply(x.flatten(2), group)


def join_heads(x: Tensor) -> Tensor:
    """[s/u, b, u, w] -> [s/u, b, u*w]."""
    return x.flatten(2)


def _to_sequence(x: Tensor, group: Group) -> Tensor:
    """[s/u, b, u, w] -> [s, b, w]."""
    u = group.size()
    received = collectives.all_to_all(x.movedim(2, 0).contiguous(), group)
    return join_zigzag(received.view(u, *x.shape[:2], x.shape[3]))


def _to_heads(x: Tensor, group: Group) -> Tensor:
    """[s, b, w] -> [s/u, b, u, w]."""
    received = collectives.all_to_all(split_zigzag(x, group.size()), group)
    return received.movedim(0, 2).contiguous()


class _HeadsToSequence(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Group) -> Tensor:
        ctx.group = group
        return _to_sequence(x, group)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return _to_heads(grad, ctx.group), None


class _SequenceToHeads(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Group) -> Tensor:
        ctx.group = group
        return _to_heads(x, group)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return _to_sequence(grad, ctx.group), None
