"""Attention of a sequence that is split over ranks, by one of four kinds of communication.

- `p2p`: keys and values go round a ring (`RingExchange`).
- `all_gather`: keys and values are gathered (`AllGatherExchange`).
- `a2a`: heads are split instead of positions while attention lasts (`ulysses`).
- `a2a+p2p`: heads inside a group of near ranks, a ring between such groups.

Keys that come in parts are attended to by the blockwise kernel; where heads are split, each rank
holds the whole sequence for a while, and any kernel will do.

Legend: s sequence, b micro batch, n query heads, g key/value heads (both of this tensor-parallel
rank), d and e widths of key and value heads.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from megatron.core.context_parallel.kv_exchange import AllGatherExchange, RingExchange
from megatron.core.context_parallel.ulysses import (
    heads_to_sequence,
    join_heads,
    key_heads_for_ranks,
    sequence_to_heads,
)
from megatron.core.foundation.errors import ConfigError
from megatron.core.kernels.attention_options import AttentionKernel, AttentionOptions
from megatron.core.kernels.blockwise_attention import KVExchange, blockwise_attention
from megatron.core.step_context.random_scope import SequenceShard
from megatron.core.topology.group import SINGLE_RANK, Group

CP_COMM_TYPES = ("p2p", "all_gather", "a2a", "a2a+p2p")


@dataclass(frozen=True)
class ContextParallelGroups:
    """Ranks that share a sequence.

    Attributes:
        cp: all of them.
        hierarchical: the same ranks in nested groups, innermost first, for `a2a+p2p`.
    """

    cp: Group = SINGLE_RANK
    hierarchical: tuple[Group, ...] = ()


@dataclass(frozen=True)
class _Plan:
    """Heads are exchanged in `heads`, keys through `exchange`; `rows` are then this rank's.

    `exchange` None: this rank then holds all positions.
    """

    heads: Group
    exchange: KVExchange | None
    rows: SequenceShard


def _plan(cp_comm_type: str, groups: ContextParallelGroups, num_local_rows: int) -> _Plan:
    total = num_local_rows * groups.cp.size()
    if groups.cp.size() == 1 or cp_comm_type == "a2a":
        return _Plan(groups.cp, None, SequenceShard.full(total))
    heads: Group = SINGLE_RANK
    ring = groups.cp
    if cp_comm_type == "a2a+p2p":
        if len(groups.hierarchical) != 2:
            raise ConfigError(
                f"a2a+p2p over {len(groups.hierarchical)} levels of context-parallel groups.",
                rule="it exchanges heads inside one level and keys round a ring in the other",
                flags=["--hierarchical-context-parallel-sizes", "--cp-comm-type"],
                fix="give two sizes whose product is the context-parallel size",
            )
        heads, ring = groups.hierarchical
    rows = SequenceShard.zigzag(total, ring.rank(), ring.size())
    if ring.size() == 1:
        return _Plan(heads, None, rows)
    if cp_comm_type == "all_gather":
        return _Plan(heads, AllGatherExchange(ring, total), rows)
    return _Plan(heads, RingExchange(ring, total), rows)


def context_parallel_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    options: AttentionOptions,
    *,
    cp_comm_type: str,
    groups: ContextParallelGroups,
    kernel: AttentionKernel = blockwise_attention,
) -> Tensor:
    """Attend to the whole sequence, of which this rank holds its zigzag part.

    Args:
        query: [s/cp, b, n, d]; key: [s/cp, b, g, d]; value: [s/cp, b, g, e]; query head i uses
            key head i // (n/g).
        options: of the whole sequence; heads are this tensor-parallel rank's.
        cp_comm_type: one of `CP_COMM_TYPES`.
        kernel: attends to the whole sequence while ranks hold heads instead of positions ("a2a");
            keys that come in parts are for the blockwise kernel alone.
    Returns:
        [s/cp, b, n*e], contiguous.
    Communication:
        on `groups.cp` or its levels, as the kind says.
    Raises:
        ConfigError: heads cannot be split over the ranks of an all-to-all.
    """
    num_heads = query.shape[2]
    plan = _plan(cp_comm_type, groups, query.shape[0])
    ranks, rank = plan.heads.size(), plan.heads.rank()
    if ranks > 1:
        picked = key_heads_for_ranks(num_heads, key.shape[2], ranks)
        if picked is not None:
            index = torch.tensor(picked, device=key.device)
            key, value = key.index_select(2, index), value.index_select(2, index)
        query, key, value = heads_to_sequence((query, key, value), plan.heads)
        own = slice(rank * query.shape[2], (rank + 1) * query.shape[2])
        options = replace(
            options,
            first_head=options.first_head + own.start,
            sink=None if options.sink is None else options.sink[own],
            max_logits=None if options.max_logits is None else options.max_logits[own],
        )
    if plan.exchange is None:
        out = kernel(query, key, value, options)
    else:
        out = blockwise_attention(query, key, value, options, plan.exchange, plan.rows)
    if ranks > 1:
        return join_heads(sequence_to_heads(out, plan.heads))
    return out
