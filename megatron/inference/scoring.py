"""Compute the log-probabilities of given texts, in every layout.

The sequences are distributed over the replicas (dp), which compute them with
`megatron.post_training.log_probs`. Every rank returns all results.

Legend: b sequences, s positions.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor, nn

from megatron.core.foundation import device
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.tensor_parallel.vocab_parallel_softmax import IGNORED_LABEL
from megatron.core.transport import torch_collectives
from megatron.inference.engine import check_prompt
from megatron.post_training.log_probs import compute_log_probs


class Row(NamedTuple):
    """A sequence; its tokens from `first_scored` on are scored, each given all tokens before it."""

    tokens: Sequence[int]
    first_scored: int = 1


class Score(NamedTuple):
    """Each scored token's log-probability (natural), and whether it is the most likely token."""

    logprobs: list[float]
    is_greedy: list[bool]


def score(
    model: nn.Module | Sequence[nn.Module],
    rows: Sequence[Row],
    *,
    vocab_size: int,
    batch_size: int,
    groups: ProcessGroupCollection,
) -> list[Score]:
    """Score sequences; every rank returns all scores.

    Args:
        model: this rank's model chunk, or its list of chunks.
        rows: at least one; the same on every rank. `first_scored` is 1 or more.
        vocab_size: the model's number of classes.
        batch_size: sequences in a micro batch. They are padded to one length, so neighbours should
            have similar lengths.
    Communication:
        see `compute_log_probs`; also all-reduces of 2 x b x s numbers on dp.
    Raises:
        ConfigError: an id is outside the vocabulary; nothing was run.
    """
    for row in rows:
        problem = check_prompt(row.tokens, 1, vocab_size, len(row.tokens) + 1)
        if problem is not None:
            raise problem
    dp_size, dp_rank = groups.dp.size(), groups.dp.rank()
    # A pipeline is full with as many micro batches as stages.
    at_a_time = batch_size * dp_size * groups.pp.size()
    found: list[Score] = []
    for begin in range(0, len(rows), at_a_time):
        part = list(rows[begin : begin + at_a_time])
        width = max(max(len(row.tokens) for row in part) - 1, 1)
        table = torch.zeros(2, at_a_time, width, device=device.current_device())
        firsts = range(dp_rank * batch_size, at_a_time, dp_size * batch_size)
        scored = compute_log_probs(
            model,
            [_batch(part[first : first + batch_size], batch_size, width) for first in firsts],
            num_valid=vocab_size,
            pg_collection=groups,
        )
        for first, one in zip(firsts, scored, strict=True):
            table[0, first : first + batch_size] = one.log_probs
            table[1, first : first + batch_size] = one.is_greedy
        torch_collectives.all_reduce(table, groups.dp)
        for index, row in enumerate(part):
            logprobs, greedy = table[:, index, row.first_scored - 1 : len(row.tokens) - 1].tolist()
            found.append(Score(logprobs, [flag == 1.0 for flag in greedy]))
    return found


def _batch(rows: Sequence[Row], num_rows: int, width: int) -> dict[str, Tensor]:
    """Return tokens and labels [b, s], padded to `num_rows` sequences of `width` tokens."""
    tokens = torch.zeros(num_rows, width, dtype=torch.long)
    labels = torch.full((num_rows, width), IGNORED_LABEL)
    for index, row in enumerate(rows):
        ids = torch.tensor(row.tokens)
        tokens[index, : len(ids) - 1] = ids[:-1]
        labels[index, row.first_scored - 1 : len(ids) - 1] = ids[row.first_scored :]
    return {"tokens": tokens, "labels": labels}
