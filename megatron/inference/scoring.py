"""What a model thinks of given texts: log-probabilities, in every layout.

Whole sequences go through the forward-only schedule as in training, so sequence, context, pipeline
and data parallelism all share the work; every rank gets all results.

Legend: b rows, s positions, v padded vocabulary.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn

from megatron.core.context_parallel import get_batch_on_this_cp_rank, sequence_shard_of_rank
from megatron.core.foundation import device
from megatron.core.pipeline_parallel.layout import loss_rank
from megatron.core.pipeline_parallel.schedules import get_forward_backward_func
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.tensor_parallel.cross_entropy import vocab_parallel_cross_entropy
from megatron.core.topology.group import SINGLE_RANK
from megatron.core.transport import backend
from megatron.core.utils import as_list, get_model_config

UNSCORED = -100
"""Label of positions whose next token is not asked for; the loss of it is 0."""


class Row(NamedTuple):
    """A sequence of which the tokens from `first_scored` on are scored, each given all before."""

    tokens: Sequence[int]
    first_scored: int = 1


class Score(NamedTuple):
    """Of each scored token: its log-probability (natural), and whether no other is likelier."""

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
    """Score rows; the same on every rank.

    Args:
        model: this rank's model chunk, or its list of chunks, in evaluation.
        rows: at least one; the same on every rank. `first_scored` is 1 or more.
        vocab_size: number of real tokens.
        batch_size: rows of one micro batch. Rows of a micro batch are padded to one length, so
            neighbours should be of similar length.
    Communication:
        the forward-only schedule; per micro batch the collectives of the loss on tp, and sums of
        2 x b x s numbers on cp and dp; a broadcast of them on pp.
    """
    chunks = as_list(model)
    dp_size, dp_rank = groups.dp.size(), groups.dp.rank()
    # Interleaved schedules run whole groups of micro batches; a pipeline is full with as many.
    at_a_time = groups.pp.size()
    found: list[Score] = []
    for begin in range(0, len(rows), batch_size * dp_size * at_a_time):
        part = list(rows[begin : begin + batch_size * dp_size * at_a_time])
        width = _width(max(len(row.tokens) for row in part) - 1, groups)
        table = torch.zeros(
            2, at_a_time * dp_size * batch_size, width, device=device.current_device()
        )
        mine = []
        for number in range(at_a_time):
            first = (number * dp_size + dp_rank) * batch_size
            mine.append((first, _batch(part[first : first + batch_size], batch_size, width)))
        scored = _run(chunks, [batch for _, batch in mine], width, batch_size, vocab_size, groups)
        for (first, _), one in zip(mine, scored, strict=False):
            table[:, first : first + batch_size] = one
        _share(table, loss_rank(get_model_config(chunks[0])), groups)
        found += [_score_of(row, table[:, index]) for index, row in enumerate(part)]
    return found


def _width(length: int, groups: ProcessGroupCollection) -> int:
    """Return a length that the ranks which share sequences can split."""
    cp_size = groups.cp.size()
    pieces = groups.tp.size() * (2 * cp_size if cp_size > 1 else 1)
    return -(-max(length, 1) // pieces) * pieces


def _batch(rows: Sequence[Row], num_rows: int, width: int) -> dict[str, Tensor]:
    """Return tokens and labels [b, s] of rows, padded in both directions."""
    tokens = torch.zeros(num_rows, width, dtype=torch.long)
    labels = torch.full((num_rows, width), UNSCORED)
    for index, row in enumerate(rows):
        ids = torch.tensor(row.tokens)
        tokens[index, : len(ids) - 1] = ids[:-1]
        labels[index, row.first_scored - 1 : len(ids) - 1] = ids[row.first_scored :]
    return {"tokens": tokens, "labels": labels}


@torch.no_grad()
def _run(
    chunks: Sequence[Any],
    batches: list[dict[str, Tensor]],
    width: int,
    batch_size: int,
    vocab_size: int,
    groups: ProcessGroupCollection,
) -> list[Tensor]:
    """Return [2, b, s] per micro batch on the last stage, this rank's positions filled."""
    held = sequence_shard_of_rank(width // groups.cp.size(), cp=groups.cp, sp=SINGLE_RANK)
    where = device.current_device()
    positions = held.positions(where)
    labels_of_next: list[Tensor] = []

    def collect(output: Tensor, **_options: bool) -> Tensor:
        labels = labels_of_next.pop(0)
        out = torch.zeros(2, batch_size, width, device=where)
        out[:, :, positions] = _of_tokens(output, labels, vocab_size, groups)
        return out

    def forward_step(iterator: Iterator[dict[str, Tensor]], chunk: Any) -> tuple[Tensor, Any]:
        batch = {name: tensor.to(where) for name, tensor in next(iterator).items()}
        batch = get_batch_on_this_cp_rank(batch, groups.cp)
        if getattr(chunk, "post_process", True):
            labels_of_next.append(batch["labels"])
        return chunk(batch["tokens"], positions[None], None), collect

    iterators = [iter(batches) for _ in chunks]
    return get_forward_backward_func()(
        forward_step_func=forward_step,
        data_iterator=iterators if len(chunks) > 1 else iterators[0],
        model=list(chunks) if len(chunks) > 1 else chunks[0],
        num_microbatches=len(batches),
        seq_length=width,
        micro_batch_size=batch_size,
        forward_only=True,
        collect_non_loss_data=True,
        pg_collection=groups,
    )


def _of_tokens(
    logits: Tensor, labels: Tensor, vocab_size: int, groups: ProcessGroupCollection
) -> Tensor:
    """Return [2, b, s/cp]: log-probability of each label, and 1 where no id has a larger logit.

    Args:
        logits: [b, s/cp, v/tp].
        labels: [b, s/cp].
    """
    loss = vocab_parallel_cross_entropy(logits, labels, tp_group=groups.tp, num_valid=vocab_size)
    first = groups.tp.rank() * logits.shape[-1]
    real = logits[..., : max(0, min(vocab_size - first, logits.shape[-1]))].float()
    local = labels - first
    is_local = (local >= 0) & (local < real.shape[-1])
    if real.shape[-1]:
        best = real.max(dim=-1).values
        own = real.gather(-1, local.masked_fill(~is_local, 0).unsqueeze(-1)).squeeze(-1)
        own = own.masked_fill(~is_local, -torch.inf)
    else:  # all of this rank's columns are padding
        best = own = torch.full_like(loss, -torch.inf)
    pair = torch.stack((best, own))
    backend.all_reduce(pair, groups.tp, dist.ReduceOp.MAX)
    return torch.stack((-loss, (pair[1] >= pair[0]).to(loss.dtype)))


def _share(table: Tensor, last_rank: int, groups: ProcessGroupCollection) -> None:
    """Bring what the ranks of cp and dp found together, and give it to all stages.

    Args:
        last_rank: of the pipeline, where the logits are.
    """
    if groups.pp.rank() == last_rank:
        for group in (groups.cp, groups.dp):
            backend.all_reduce(table, group)
    backend.broadcast(table, groups.pp, last_rank)


def _score_of(row: Row, table: Tensor) -> Score:
    logprobs, greedy = table[:, row.first_scored - 1 : len(row.tokens) - 1].tolist()
    return Score(logprobs, [flag == 1.0 for flag in greedy])
