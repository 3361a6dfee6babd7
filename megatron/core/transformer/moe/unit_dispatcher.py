"""The exchange of tokens in layout-invariant mode.

An expert computes one product for the tokens of each unit of the sequence of each micro batch, in
their global order, whichever tensor-parallel ranks have them. So the ranks that exchange hold whole
units: they are the larger one of the groups `tp` and `tp_ep`. If `tp` is larger, several ranks of
it hold the same experts, and each of them computes a part of these experts.

All shards of an expert receive its tokens, and complete their sums before the outputs return, so
the first shard alone sends outputs, and gradients of tokens, back. A rank adds the outputs of a
token's experts in the order of the experts.

Legend: t tokens of this rank, h hidden, e experts, l experts of this rank, q ranks of the exchange,
c choices of this rank's tokens, n rows for its experts, u units of a sequence of this rank.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.step_context.overlap import yield_to_peer
from megatron.core.tensor_parallel.mappings import CollectivePair
from megatron.core.topology.group import Group
from megatron.core.transformer.moe.token_dispatcher import (
    DispatchedTokens,
    ExchangeCapacity,
    OverlapFn,
    TokenDispatcher,
    permutation_of,
    transpose_blocks,
)
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.transport import collectives


class MoEUnitTokenDispatcher(TokenDispatcher):
    """Sends each token to all shards of its experts; see the module.

    Communication: an all-gather of u * e counts, and all-to-alls of the rows' activations and
    weights and of the outputs, over the larger one of `tp` and `tp_ep`.
    """

    def __init__(
        self,
        config: TransformerConfig,
        num_local_experts: int,
        local_expert_indices: Sequence[int],
        groups: ProcessGroupCollection,
    ) -> None:
        super().__init__(config, num_local_experts, local_expert_indices, groups)
        tp, tp_ep = (groups.ranks.get(name, [0]) for name in ("tp", "tp_ep"))
        ranks = max(tp, tp_ep, key=len)
        self.group = groups.tp_ep if ranks is tp_ep else groups.tp
        self.ranks_per_unit, self.tp = len(tp), groups.tp
        self.experts_of, self.is_first_shard = [list(range(num_local_experts))], [True]
        if groups.layout is not None:
            places = [groups.layout.expert.coordinates(rank) for rank in ranks]
            copies = sorted({place["dp"] for place in places})
            self.experts_of = [
                [
                    place["ep"] * num_local_experts + index
                    for index in range(num_local_experts)
                    if index % len(copies) == copies.index(place["dp"])
                ]
                for place in places
            ]
            self.is_first_shard = [place["tp"] == 0 for place in places]

    def dispatch(
        self,
        tokens: Tensor,
        probs: Tensor,
        routing_map: Tensor,
        overlap_fn: OverlapFn = None,
        num_assignments: int | None = None,
        capacity: ExchangeCapacity | None = None,
    ) -> DispatchedTokens:
        """Dispatch after `overlap_fn`; the result has one number of rows for each expert and unit
        of a micro batch."""
        if overlap_fn is not None:
            overlap_fn()
        permutation = permutation_of(tokens, routing_map, num_assignments)
        exchange = _Exchange.of(self, self._choices_of_units(routing_map))

        def combine(output: Tensor, overlap_fn: OverlapFn = None) -> Tensor:
            if overlap_fn is not None:
                overlap_fn()
            return permutation.unpermute(CollectivePair.apply(output, exchange, collect, spread))

        return DispatchedTokens(
            CollectivePair.apply(permutation.permute(tokens), exchange, spread, collect),
            CollectivePair.apply(permutation.weights(probs), exchange, spread, collect),
            exchange.rows_of_products,
            combine,
        )

    def _choices_of_units(self, routing_map: Tensor) -> Tensor:
        """Count the choices of each expert in each unit of the sequence: [t, e] -> [u, e]."""
        count, own, ranks = self.config.sequence_units_of_rank, len(routing_map), self.tp.size()
        count = count if own * ranks % count == 0 else 1
        tokens = torch.arange(own, device=routing_map.device) + self.tp.rank() * own
        counts = routing_map.new_zeros(count, routing_map.shape[1], dtype=torch.long)
        return counts.index_add_(0, tokens * count // max(own * ranks, 1), routing_map.long())


@dataclass(frozen=True)
class _Exchange:
    """Rows that this rank sends and receives.

    Attributes:
        choices: number of the choice in each row that is sent, int64; choices are ordered by
            expert, then by token.
        sent, received: rows for and from each rank, [q].
        returned, collected: the same for outputs; a shard that is not the first returns none.
        kept: the choice of each output that returns, int64 [c].
        blocks: [source][expert] rows of this rank, in order of arrival.
        rows_of_products: of each expert and unit, [l * units].
    """

    group: Group
    choices: Tensor
    kept: Tensor
    sent: list[int]
    received: list[int]
    returned: list[int]
    collected: list[int]
    blocks: list[list[int]]
    rows_of_products: list[int]

    @staticmethod
    def of(dispatcher: MoEUnitTokenDispatcher, assignments: Tensor) -> _Exchange:
        """Plan the exchange of a rank whose tokens of each unit choose the experts [u, e] so many
        times.

        Communication: an all-gather of u * e counts.
        """
        group, own = dispatcher.group, dispatcher.group.rank()
        counts = assignments.unsqueeze(0)
        counts = collectives.all_gather(counts, group) if group.size() > 1 else counts
        table = counts.sum(1).tolist()
        # [ranks, u, e] -> [e, ranks / tp, u]: the tensor-parallel ranks share units.
        of_units = counts.unflatten(0, (-1, dispatcher.ranks_per_unit)).sum(1).permute(2, 0, 1)
        ranges = torch.arange(sum(table[own])).split(table[own])
        of_ranks = [[ranges[expert] for expert in one] for one in dispatcher.experts_of]
        is_first = dispatcher.is_first_shard
        sent = [sum(map(len, one)) for one in of_ranks]
        mine = dispatcher.experts_of[own]
        blocks = [[row[expert] for expert in mine] for row in table]
        received = [sum(block) for block in blocks]
        products = [
            rows if expert in mine else 0
            for expert in dispatcher.local_expert_indices
            for rows in of_units[expert].flatten().tolist()
        ]

        def joined(of_ranks: list[list[Tensor]]) -> Tensor:
            return torch.cat([rows for one in of_ranks for rows in one]).to(assignments.device)

        return _Exchange(
            group,
            joined(of_ranks),
            joined([one for one, returns in zip(of_ranks, is_first, strict=True) if returns]),
            sent,
            received,
            received if is_first[own] else [0] * len(received),
            [n if returns else 0 for n, returns in zip(sent, is_first, strict=True)],
            blocks,
            products,
        )

    def exchange(self, rows: Tensor, received: list[int], sent: list[int]) -> Tensor:
        """Send rows [..., h] to every rank, and receive rows of every rank."""
        if self.group.size() == 1:
            return rows
        work = collectives.start_all_to_all(rows.contiguous(), self.group, received, sent)
        yield_to_peer()
        return work.wait()


def spread(rows: Tensor, plan: _Exchange) -> Tensor:
    """Send rows [c, ...] of this rank's choices to all shards: [n, ...], by expert."""
    rows = plan.exchange(rows.index_select(0, plan.choices), plan.received, plan.sent)
    return transpose_blocks(rows, plan.blocks)


def collect(rows: Tensor, plan: _Exchange) -> Tensor:
    """Send rows [n, ...] of the first shard back: [c, ...]."""
    rows = transpose_blocks(rows, list(zip(*plan.blocks, strict=True)))
    rows = plan.exchange(rows[: sum(plan.returned)], plan.collected, plan.returned)
    return torch.empty_like(rows).index_copy_(0, plan.kept, rows)
