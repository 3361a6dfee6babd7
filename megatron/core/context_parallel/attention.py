"""Attention of a sequence that is split over ranks, by one of four kinds of communication.

- `p2p`: keys and values go round a ring (`exchange.Ring`).
- `all_gather`: keys and values are gathered (`exchange.Gather`).
- `a2a`: heads are split instead of positions while attention lasts (`head_exchange`).
- `a2a+p2p`: heads inside a group of near ranks, a ring between such groups.

All four, and the attention of one rank, are the same blockwise kernel over other sets of keys.

Legend: s sequence, b micro batch, n query heads, g key/value heads (both of this tensor-parallel
rank), d and e widths of key and value heads.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from megatron.core.context_parallel.exchange import (
    Exchange,
    Gather,
    KeysAndValues,
    NoExchange,
    Ring,
)
from megatron.core.context_parallel.head_exchange import (
    heads_to_sequence,
    join_heads,
    key_heads_for_ranks,
    sequence_to_heads,
)
from megatron.core.errors import ConfigError
from megatron.core.kernels.block_mask import MaskSpec
from megatron.core.kernels.blockwise import (
    AttentionRule,
    PartialAttention,
    attend,
    attend_backward,
    sink_rows,
)
from megatron.core.process_groups_config import Group
from megatron.core.rng import AttentionKeepMask, SequenceRows
from megatron.core.utils import get_pg_rank, get_pg_size

COMMUNICATION_TYPES = ("p2p", "all_gather", "a2a", "a2a+p2p")


@dataclass(frozen=True)
class ContextGroups:
    """Ranks that share a sequence.

    Attributes:
        cp: all of them; None is one rank.
        levels: the same ranks in nested groups, innermost first, for `a2a+p2p`.
    """

    cp: Group = None
    levels: tuple[Group, ...] = ()


@dataclass(frozen=True)
class _Plan:
    """Heads are exchanged in `heads`, keys through `exchange`; `rows` are then this rank's."""

    heads: Group
    exchange: Exchange
    rows: SequenceRows


def _plan(kind: str, groups: ContextGroups, num_local_rows: int) -> _Plan:
    size = get_pg_size(groups.cp)
    total = num_local_rows * size
    whole = SequenceRows.whole(total)
    if size == 1:
        return _Plan(None, NoExchange(whole), whole)
    if kind == "a2a":
        return _Plan(groups.cp, NoExchange(whole), whole)
    heads, ring = None, groups.cp
    if kind == "a2a+p2p":
        if len(groups.levels) != 2:
            raise ConfigError(
                f"a2a+p2p over {len(groups.levels)} levels of context-parallel groups.",
                rule="it exchanges heads inside one level and keys round a ring in the other",
                flags=["--hierarchical-context-parallel-sizes", "--cp-comm-type"],
                fix="give two sizes whose product is the context-parallel size",
            )
        heads, ring = groups.levels
    rows = SequenceRows.zigzag(total, get_pg_rank(ring), get_pg_size(ring))
    if get_pg_size(ring) == 1:
        return _Plan(heads, NoExchange(rows), rows)
    if kind == "all_gather":
        return _Plan(heads, Gather(ring, total), rows)
    return _Plan(heads, Ring(ring, total), rows)


def context_parallel_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    scale: float,
    sees: MaskSpec,
    kind: str = "p2p",
    groups: ContextGroups | None = None,
    dropout: float = 0.0,
    first_head: int = 0,
    sink: Tensor | None = None,
    softcap: float | None = None,
) -> Tensor:
    """Attend to the whole sequence, of which this rank holds its zigzag part.

    Args:
        query: [s/cp, b, n, d]; key: [s/cp, b, g, d]; value: [s/cp, b, g, e]; query head i uses
            key head i // (n/g).
        scale: factor on the scores.
        sees: which keys a query sees.
        kind: one of `COMMUNICATION_TYPES`; means nothing on one rank.
        dropout: of the probabilities, drawn independently of the layout.
        first_head: index in the whole model of this tensor-parallel rank's first query head.
        sink: [n], scores of a key without value, or None.
        softcap: bound c of the scaled scores, c * tanh(score / c), or None.
    Returns:
        [s/cp, b, n*e], contiguous.
    Communication:
        on `groups.cp` or its levels, as the kind says.
    Raises:
        ConfigError: heads cannot be split over the ranks of an all-to-all.
    """
    groups = groups or ContextGroups()
    local, b, n, _ = query.shape
    plan = _plan(kind, groups, local)
    keep_mask = None
    if dropout:
        keep_mask = AttentionKeepMask.next(1.0 - dropout, local * get_pg_size(groups.cp))
    ranks = get_pg_size(plan.heads)
    if ranks > 1:
        picked = key_heads_for_ranks(n, key.shape[2], ranks)
        if picked is not None:
            index = torch.tensor(picked, device=key.device)
            key, value = key.index_select(2, index), value.index_select(2, index)
        query, key, value = heads_to_sequence((query, key, value), plan.heads)
        first_head += get_pg_rank(plan.heads) * query.shape[2]
        if sink is not None:
            own = slice(get_pg_rank(plan.heads) * query.shape[2], None)
            sink = sink[own][: query.shape[2]]
    rule = AttentionRule(
        sees=sees,
        scale=scale,
        batch=b,
        groups=key.shape[2],
        heads_per_group=query.shape[2] // key.shape[2],
        dropout=keep_mask,
        first_head=first_head,
        softcap=softcap,
    )
    out = _attend_rows(query, key, value, sink, rule, plan)
    if ranks > 1:
        return join_heads(sequence_to_heads(out, plan.heads))
    return out.flatten(2)


def _attend_rows(
    query: Tensor, key: Tensor, value: Tensor, sink: Tensor | None, rule: AttentionRule, plan: _Plan
) -> Tensor:
    """[s', b, n', d] -> [s', b, n', e], in the kernel's order of dimensions in between."""
    s, b, n, d = query.shape
    g, r, e = rule.groups, rule.heads_per_group, value.shape[3]
    queries = query.reshape(s, b, g, r, d).permute(1, 2, 0, 3, 4).reshape(b * g, s * r, d)
    keys = key.permute(1, 2, 0, 3).reshape(b * g, s, d)
    values = value.permute(1, 2, 0, 3).reshape(b * g, s, e)
    out = _Attention.apply(queries, keys, values, sink, rule, plan.exchange, plan.rows)
    return out.view(b, g, s, r, e).permute(2, 0, 1, 3, 4).reshape(s, b, n, e)


class _Attention(torch.autograd.Function):
    """queries [z, s*r, d], keys [z, s, d], values [z, s, e] -> [z, s*r, e]."""

    @staticmethod
    def forward(
        ctx: Any,
        queries: Tensor,
        keys: Tensor,
        values: Tensor,
        sink: Tensor | None,
        rule: AttentionRule,
        exchange: Exchange,
        rows: SequenceRows,
    ) -> Tensor:
        own = KeysAndValues.of(keys, values)
        result = PartialAttention.empty(queries, values.shape[2])
        for held, key_rows in exchange.visits(own):
            attend(result, queries, held.keys, held.values, rows, key_rows, rule)
        if sink is not None:
            result.add_sink(sink, rule)
        out = result.out.to(queries.dtype)
        ctx.rule, ctx.exchange, ctx.rows = rule, exchange, rows
        ctx.key_shape, ctx.value_shape = keys.shape, values.shape
        ctx.save_for_backward(queries, own.flat, out, result.lse, sink)
        return out

    @staticmethod
    def backward(ctx: Any, grad_out: Tensor) -> tuple[Any, ...]:
        queries, flat, out, lse, sink = ctx.saved_tensors
        own = KeysAndValues.over(flat, ctx.key_shape, ctx.value_shape)
        delta = (out.float() * grad_out.float()).sum(-1)
        # A query that saw nothing has probabilities exp(-inf - lowest) = 0.
        lse = lse.clamp_min(torch.finfo(torch.float32).min)
        grad_queries = torch.zeros_like(queries, dtype=torch.float32)
        gradient = own.zeros()
        for held, key_rows, buffer in ctx.exchange.visits_back(own, gradient):
            attend_backward(
                grad_out, lse, delta, queries, held.keys, held.values, ctx.rows, key_rows,
                ctx.rule, (grad_queries, buffer.keys, buffer.values),
            )  # fmt: skip
        grad_sink = None
        if sink is not None:
            weight = (sink_rows(sink, ctx.rule, lse) - lse).exp_().mul_(delta)
            by_head = weight.view(ctx.rule.batch, ctx.rule.groups, -1, ctx.rule.heads_per_group)
            grad_sink = by_head.sum((0, 2)).flatten().neg_().to(sink.dtype)
        return (
            grad_queries.to(queries.dtype),
            gradient.keys.to(queries.dtype),
            gradient.values.to(queries.dtype),
            grad_sink,
            None,
            None,
            None,
        )
