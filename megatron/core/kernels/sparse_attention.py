"""Attention of a block of queries to the keys that an indexer scores highest, and its loss.

DeepSeek-AI, "DeepSeek-V3.2: Pushing the Frontier of Open Large Language Models", section 2.1,
arXiv 2512.02556. The indexer's score of key s for query t is sum_j w[t, j] relu(q[t, j] k[s]); its
loss is the divergence of softmax(scores) from the distribution of attention over all heads.

An indexer may also choose windows of consecutive keys. It scores one key for each window (GLM-5.3),
or each head scores the keys for its group of heads of attention; the best key of a window counts
(MiniMax M3).

Legend: q queries of the block, k keys, b micro batch, n heads of this rank, d and e widths of key
and value heads; of the indexer j heads and i their width; w windows.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum

import torch
import torch.nn.functional as F
from torch import Tensor

from megatron.core.kernels.attention_options import AttentionOptions
from megatron.core.kernels.block_mask import masked_keys
from megatron.core.kernels.torch_attention import (
    record_max_logits,
    scaled_scores,
    softmax_with_sink,
    weighted_values,
)
from megatron.core.kernels.windows import Windows
from megatron.core.parameters.keyed_draws import AttentionKeepMask
from megatron.core.step_context.random_scope import SequenceShard


class Compared(Enum):
    """Keys that the loss uses to compare the indexer's distribution with attention's."""

    NOTHING = 0
    CHOSEN = 1
    VISIBLE = 2


@dataclass(frozen=True)
class Choice:
    """How queries choose keys.

    Attributes:
        topk: keys that a query attends to.
        windows: windows of keys that are chosen together; None: keys are chosen one by one.
        num_local: windows that a query always chooses: its own window and windows before it.
    """

    topk: int
    windows: Windows | None = None
    num_local: int = 0

    @property
    def most(self) -> int:
        """The largest number of keys that a query attends to."""
        return self.topk + (0 if self.windows is None else self.windows.size - 1)


@dataclass(frozen=True)
class SparseSpec:
    """Options shared by all blocks of queries.

    Attributes:
        options: options of the whole sequence, for this rank's heads.
        choice: how queries choose keys.
        uses_relu: negative scores of a head of the indexer count as zero.
        compared: the keys of the loss.
        keep_mask: draws dropout; None without.
        sum_over_ranks: sums a tensor over the ranks that hold other heads.
    """

    options: AttentionOptions
    choice: Choice
    uses_relu: bool
    compared: Compared
    keep_mask: AttentionKeepMask | None
    sum_over_ranks: Callable[[Tensor], Tensor]


def index_scores(query: Tensor, weights: Tensor | None, key: Tensor, uses_relu: bool) -> Tensor:
    """Return the score [b, q, k] of every key for every query, in fp32 or wider; without weights
    the score of each head, [b, j, q, k].

    Args:
        query: [q, b, j, i]; weights: [q, b, j]; key: [k, b, i].
    """
    q, b, j, i = query.shape
    dtype = torch.promote_types(query.dtype, torch.float32)
    rows = query.to(dtype).transpose(0, 1).reshape(b, q * j, i)
    products = torch.bmm(rows, key.to(dtype).permute(1, 2, 0)).view(b, q, j, -1)
    if uses_relu:
        products = products.relu()
    if weights is None:
        return products.transpose(1, 2)
    return torch.matmul(weights.to(dtype).transpose(0, 1).unsqueeze(2), products).squeeze(2)


def choose_keys(scores: Tensor, hidden: Tensor, topk: int) -> Tensor:
    """Return bool [b, q, k], True at the `topk` visible keys with the highest scores.

    Of equal scores the earliest keys are taken, so that the choice does not depend on a sort; a
    query that sees fewer keys has all of them.

    Args:
        scores: [b, q, k]. hidden: bool, broadcastable to it.
    """
    if topk >= scores.shape[-1]:
        return ~hidden.expand_as(scores)
    scores = scores.masked_fill(hidden, float("-inf"))
    least = scores.topk(topk, dim=-1).values[..., -1:]
    above, equal = scores > least, scores == least
    left = topk - above.sum(-1, keepdim=True)
    is_early = equal.cumsum(-1, dtype=torch.int32) <= left
    return (above | (equal & is_early)) & ~hidden


def choose(scores: Tensor, hidden: Tensor, choice: Choice) -> Tensor:
    """Return bool, True at the visible keys that a query attends to: [b, q, k], or [b, j, q, k] if
    the heads of the indexer choose separately.

    A window with one key is chosen if its last token is visible; the visible keys after the last
    such window are always chosen.

    Args:
        scores: of keys [b, q, k], of windows [b, q, w], or of keys for each head [b, j, q, k].
        hidden: bool [1 or b, q, k].
    """
    windows, (b, k) = choice.windows, (len(scores), hidden.shape[-1])
    if windows is None:
        return choose_keys(scores, hidden, choice.topk)
    count = choice.topk // windows.size
    if scores.dim() == 3:
        ends = windows.begins[:, : scores.shape[-1]] + windows.size - 1
        after = F.pad(hidden, (0, 1), value=True).expand(b, -1, -1)
        unseen = after.gather(-1, ends.clamp(max=k).unsqueeze(1).expand_as(scores))
        passed_over = ~(unseen | choose_keys(scores, unseen, count))
        return ~(hidden | windows.in_windows(passed_over, k))
    places = windows.of_tokens(k).expand(b, -1)
    own = (torch.arange(k, device=hidden.device) * ~hidden).amax(-1)  # the last visible key
    own = places.gather(1, own.expand(b, -1))
    hidden = hidden.unsqueeze(1)
    best = scores.new_full((*scores.shape[:-1], windows.begins.shape[1]), float("-inf"))
    scores = scores.masked_fill(hidden, float("-inf"))
    best = best.scatter_reduce(-1, places[:, None, None].expand_as(scores), scores, "amax")
    unseen = best == float("-inf")
    distance = own.unsqueeze(-1) - torch.arange(best.shape[-1], device=own.device)
    is_local = ((distance >= 0) & (distance < choice.num_local)).unsqueeze(1)
    chosen = choose_keys(best.masked_fill(is_local & ~unseen, float("inf")), unseen, count)
    return windows.in_windows(chosen, k) & ~hidden


@torch.no_grad()
def chosen_positions(
    spec: SparseSpec, hidden: Tensor, index_query: Tensor, index_weights: Tensor, index_key: Tensor
) -> Tensor:
    """Return the positions of the chosen keys of a block of queries, int32 [b, q, most]; -1 fills
    the rows of queries that see fewer keys.

    Args:
        others: as in `attend_rows`.
    """
    scores = index_scores(index_query, index_weights, index_key, spec.uses_relu)
    chosen, most = choose(scores, hidden, spec.choice), spec.choice.most
    missing = max(0, most - chosen.shape[-1])
    first = F.pad(chosen, (0, missing)).byte().topk(most, dim=-1, sorted=False)
    return torch.where(first.values > 0, first.indices, -1).int()


def _is_chosen(positions: Tensor, hidden: Tensor) -> Tensor:
    """Return bool [b, q, k], True at positions [b, q, most]; -1 chooses no key."""
    b, q, _ = positions.shape
    k = hidden.shape[-1]
    found = torch.zeros(b, q, k + 1, dtype=torch.bool, device=positions.device)
    return found.scatter_(-1, torch.where(positions < 0, k, positions).long(), True)[..., :k]


def hidden_keys(spec: SparseSpec, begin: int, end: int, last: int, local: slice,
                device: torch.device, first: int = 0) -> Tensor:  # fmt: skip
    """Return bool [1 or b, q, k], True where position, document or mask hide a key.

    Args:
        begin, end: positions of the queries; `local` are their rows on this rank.
        first, last: positions of the first key, and of the key after the last one.
    """
    mask, given = spec.options.mask, spec.options.attention_mask
    hidden = masked_keys(begin, end, first, last, mask.window, device)
    if hidden is None:
        hidden = torch.zeros(end - begin, last - first, dtype=torch.bool, device=device)
    hidden = hidden.unsqueeze(0)
    if mask.document_ids is not None:
        ids = mask.document_ids
        hidden = hidden | (ids[:, begin:end, None] != ids[:, None, first:last])
    if given is not None:
        rows = given if given.shape[-2] == 1 else given[..., local, :]
        hidden = hidden | rows[:, 0, :, first:last]
    return hidden


def attend_rows(
    query: Tensor,
    index_query: Tensor | None,
    index_weights: Tensor | None,
    key: Tensor,
    value: Tensor,
    index_key: Tensor | None,
    sink: Tensor | None,
    positions: Tensor | None,
    *,
    hidden: Tensor,
    rows: SequenceShard,
    counted: Tensor | None,
    spec: SparseSpec,
) -> tuple[Tensor, Tensor]:
    """Attend with a block of queries to the keys that the indexer chooses.

    Args:
        query: [q, b, n, d]; key: [k, b, g, d]; value: [k, b, g, e].
        index_query: [q, b, j, i]; index_weights: [q, b, j]; index_key: [t, b, i], of windows or of
            the first t keys; a query attends to all visible keys after them. Only the loss gives
            them a gradient. None in a layer without an indexer; weights are None if heads choose
            separately.
        sink: [n], scores of a key without value that every query sees; None without.
        positions: [b, q, most], positions of the keys, -1 for none; None: the indexer chooses, or
            without one a query attends to all visible keys.
        hidden: bool [1 or b, q, k], True where a query does not see a key.
        rows: the positions of the queries.
        counted: bool [b, q], False for queries that are padding; None: all are tokens.
    Returns:
        ([q, b, n*e], the loss summed over the queries that are tokens, [])
    Communication:
        with a loss, a sum of [b, q, k] over the ranks that hold other heads.
    """
    options = spec.options
    indexed, t = query.new_zeros(()), 0
    if index_key is not None and (positions is None or spec.compared is not Compared.NOTHING):
        assert index_query is not None
        indexed, t = (
            index_scores(index_query, index_weights, index_key, spec.uses_relu),
            len(index_key),
        )
    chosen = ~hidden
    if positions is not None:
        chosen = _is_chosen(positions, hidden) & chosen  # this layer may have a window
    elif index_key is not None and spec.choice.windows is not None:
        chosen = choose(indexed.detach(), hidden, spec.choice)
    elif index_key is not None:
        chosen = choose_keys(indexed.detach(), hidden[..., :t], spec.choice.topk)
        if t < hidden.shape[-1]:
            others = ~hidden[..., t:].expand(len(chosen), -1, -1)
            chosen = torch.cat((chosen, others), -1)
    scores = scaled_scores(query, key, options, in_fp32=True)
    lowest = torch.finfo(scores.dtype).min
    by_head = chosen.unsqueeze(1)
    if chosen.dim() == 4:
        by_head = chosen.repeat_interleave(scores.shape[1] // chosen.shape[1], 1)
    kept = scores.masked_fill(~by_head, lowest)
    record_max_logits(kept, options)
    probabilities = softmax_with_sink(kept, sink)
    loss = indexed.new_zeros(())
    if spec.compared is Compared.CHOSEN:
        of_chosen = probabilities.detach()[..., :t]
        loss = _divergence(of_chosen, indexed, chosen[..., :t], counted, spec)
    elif spec.compared is Compared.VISIBLE:
        hidden = hidden[..., :t]
        visible = scores.detach()[..., :t].masked_fill(hidden.unsqueeze(1), lowest)
        loss = _divergence(torch.softmax(visible, -1), indexed, ~hidden, counted, spec)
    probabilities = probabilities.to(query.dtype)
    if spec.keep_mask is not None:
        probabilities = probabilities * _keep(spec, probabilities, rows)
    return weighted_values(probabilities, value), loss


def _divergence(
    attention: Tensor,
    indexed: Tensor,
    compared: Tensor,
    counted: Tensor | None,
    spec: SparseSpec,
) -> Tensor:
    """Return sum over queries of KL(attention over all heads || softmax(scores)), [].

    Args:
        attention: [b, n, q, k], without gradient, zero at keys that are not compared.
        indexed: the indexer's scores [b, q, k]. compared: bool, broadcastable to them.
    """
    target = spec.sum_over_ranks(attention.sum(1)).to(indexed.dtype)
    total = target.sum(-1, keepdim=True)  # 0 for a query that sees no key of the indexer
    target = target / total.clamp(min=torch.finfo(total.dtype).tiny)
    masked = indexed.masked_fill(~compared, torch.finfo(indexed.dtype).min)
    found = (torch.xlogy(target, target) - target * torch.log_softmax(masked, -1)).sum(-1)
    return found.sum() if counted is None else (found * counted).sum()


def _keep(spec: SparseSpec, like: Tensor, rows: SequenceShard) -> Tensor:
    """Draw dropout [b, n, q, k]: 0 where a probability is dropped, else 1/(1-p)."""
    assert spec.keep_mask is not None
    b, n, _, k = like.shape
    drawn = [
        spec.keep_mask.draw(sample, spec.options.first_head + head, rows, like.dtype, like.device)[
            :, :k
        ]
        for sample in range(b)
        for head in range(n)
    ]
    return torch.stack(drawn).view_as(like).div_(spec.keep_mask.keep_probability)
