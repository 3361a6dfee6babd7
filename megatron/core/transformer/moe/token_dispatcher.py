"""Send tokens to the ranks that hold their experts, and the outputs back.

Every rank of a stage holds different tokens. The ranks of a `tp_ep` group together hold all experts
once: the experts are distributed over `ep`, and each expert is split over `expt_tp`. A dispatcher
sends every token to all shards of its experts, and sums their outputs; the experts themselves do
not communicate. Expert parallelism: D. Lepikhin et al., "GShard", section 3.3, arXiv 2006.16668.

Legend: t tokens of this rank, h hidden, e experts, l experts of this rank, n rows for its experts.
In exchanges of fixed sizes: r ranks of `ep`, c rows that a rank sends to each of them, q ranks (of
`ep` times `expt_tp`) that send to this one.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from megatron.core.foundation.device import is_host_memory
from megatron.core.kernels.permutation import PERMUTATION, IndexPermutation, Permutation
from megatron.core.kernels.registry import Request
from megatron.core.kernels.row_counts import RowCounts
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.tensor_parallel import mappings
from megatron.core.topology.group import Group
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.transport import collectives

OverlapFn = Callable[[], None] | None
"""Computation that runs while tokens are in flight."""


class Combine(Protocol):
    """Sends the outputs of the experts back to the ranks of their tokens."""

    def __call__(self, output: Tensor, overlap_fn: OverlapFn = None) -> Tensor:
        """Return the sums [t, h] over experts of their outputs [n, h]."""


@dataclass(frozen=True)
class DispatchedTokens:
    """The tokens that the experts of this rank have received.

    Attributes:
        tokens: [n, h], ordered by local expert; padding rows may follow, whose outputs are unused.
        probs: [n], the weight of each row in its token's output.
        tokens_per_expert: rows of each local expert; `RowCounts` if the host has not read them.
        combine: from the experts' output [n, h] (partial over `expt_tp`) to the weighted sums
            [t, h] of this rank's own tokens; it takes `overlap_fn` as `dispatch` does.
        num_dropped: int64 [], choices of this rank's tokens that did not fit; None if every
            choice fits by construction.
    """

    tokens: Tensor
    probs: Tensor
    tokens_per_expert: Sequence[int]
    combine: Combine
    num_dropped: Tensor | None = None


@dataclass(frozen=True)
class ExchangeCapacity:
    """Sizes of an exchange that are fixed before the router has chosen.

    rows_per_rank: rows that a rank sends to each rank; most_choices: upper bound on the choices of
    the tokens of a rank.
    """

    rows_per_rank: int
    most_choices: int


class TokenDispatcher:
    """The interface between a router and its experts.

    Args:
        num_local_experts: experts of this rank.
        local_expert_indices: their numbers in the model, consecutive.
    """

    def __init__(
        self,
        config: TransformerConfig,
        num_local_experts: int,
        local_expert_indices: Sequence[int],
        groups: ProcessGroupCollection,
    ) -> None:
        self.config, self.num_local_experts = config, num_local_experts
        self.local_expert_indices = list(local_expert_indices)
        self.ep, self.expt_tp, self.tp_ep = groups.ep, groups.expt_tp, groups.tp_ep

    def dispatch(
        self,
        tokens: Tensor,
        probs: Tensor,
        routing_map: Tensor,
        overlap_fn: OverlapFn = None,
        num_assignments: int | None = None,
        capacity: ExchangeCapacity | None = None,
    ) -> DispatchedTokens:
        """Send tokens [t, h] to their experts.

        Args:
            probs: [t, e], weights; routing_map: bool [t, e], which experts each token is routed to.
            overlap_fn: called once, during the exchange if the dispatcher can, else before it.
            num_assignments: number of True entries of the map, if the host has it.
            capacity: send this fixed number of rows to every rank, without reading the map on the
                host.
        """
        raise NotImplementedError


def expert_assignments(routing_map: Tensor, number: int | None = None) -> tuple[Tensor, Tensor]:
    """Return (expert, token) of every assignment, int64 [n] each: by expert, then by token.

    Args:
        number: n, if the host has it; otherwise the host waits for the device to count.
    """
    by_expert = routing_map.t()
    if number is None or is_host_memory(routing_map.device):
        assignments = by_expert.nonzero()
    else:
        assignments = torch.nonzero_static(by_expert, size=number)
    return assignments[:, 0], assignments[:, 1]


def permutation_of(
    tokens: Tensor, routing_map: Tensor, num_assignments: int | None = None
) -> Permutation:
    """Return the permutation by expert of tokens [t, h] with a map bool [t, e].

    Args:
        num_assignments: number of True entries of the map, if the host has it.
    """
    expert, token = expert_assignments(routing_map, num_assignments)
    return PERMUTATION.choose(Request.of(tokens)).kernel.run(expert, token, len(tokens))


class MoEAllGatherTokenDispatcher(TokenDispatcher):
    """Every rank of `tp_ep` receives all tokens of the group and selects its experts' tokens.

    Communication: all-gathers of t * h activations and t * e weights over `tp_ep`, and a
    reduce-scatter of the output; backward the reverse. All ranks have the same number of tokens.
    """

    def dispatch(
        self,
        tokens: Tensor,
        probs: Tensor,
        routing_map: Tensor,
        overlap_fn: OverlapFn = None,
        num_assignments: int | None = None,
        capacity: ExchangeCapacity | None = None,
    ) -> DispatchedTokens:
        """Dispatch after `overlap_fn`; the host reads the map."""
        if overlap_fn is not None:
            overlap_fn()
        group = self.tp_ep
        tokens = mappings.gather_from_sequence_parallel_region(tokens, group=group)
        probs = mappings.gather_from_sequence_parallel_region(probs, group=group)
        if group.size() > 1:
            marks = collectives.all_gather(routing_map.to(torch.uint8), group)
            routing_map = marks.bool()
        first = self.local_expert_indices[0]
        local_map = routing_map[:, first : first + self.num_local_experts]
        permutation = permutation_of(tokens, local_map)

        def combine(output: Tensor, overlap_fn: OverlapFn = None) -> Tensor:
            if overlap_fn is not None:
                overlap_fn()
            summed = permutation.unpermute(output)
            return mappings.reduce_scatter_to_sequence_parallel_region(summed, group)

        return DispatchedTokens(
            permutation.permute(tokens),
            permutation.weights(probs, first),
            local_map.sum(0).tolist(),
            combine,
        )


class MoEAlltoAllTokenDispatcher(TokenDispatcher):
    """Each rank sends a token once for each of its experts, to the rank that holds the expert.

    Communication: an all-gather of e counts over `tp_ep`; all-to-alls of the rows' activations
    and weights over `ep`, an all-gather over `expt_tp`, and both reversed for the output.
    """

    def dispatch(
        self,
        tokens: Tensor,
        probs: Tensor,
        routing_map: Tensor,
        overlap_fn: OverlapFn = None,
        num_assignments: int | None = None,
        capacity: ExchangeCapacity | None = None,
    ) -> DispatchedTokens:
        """Dispatch; `overlap_fn` runs during the exchange."""
        if capacity is not None and self.ep.size() * self.expt_tp.size() > 1:
            return self._dispatch_in(capacity, tokens, probs, routing_map, overlap_fn)
        ep, expt_tp = self.ep, self.expt_tp
        permutation = permutation_of(tokens, routing_map, num_assignments)
        plan = _ExchangePlan.of(self, routing_map.sum(0))

        def send_to_experts(values: Tensor, overlap_fn: OverlapFn = None) -> Tensor:
            received = mappings.all_to_all(ep, values, plan.received, plan.sent, overlap_fn)
            received = mappings.gather_from_sequence_parallel_region(
                received, group=expt_tp, output_split_sizes=plan.gathered
            )
            return transpose_blocks(received, plan.blocks)

        def combine(output: Tensor, overlap_fn: OverlapFn = None) -> Tensor:
            by_source = transpose_blocks(output, list(zip(*plan.blocks, strict=True)))
            summed = mappings.reduce_scatter_to_sequence_parallel_region(
                by_source, expt_tp, plan.gathered
            )
            back = mappings.all_to_all(ep, summed, plan.sent, plan.received, overlap_fn)
            return permutation.unpermute(back)

        weights: list[Tensor] = []

        def overlapped() -> None:
            weights.append(send_to_experts(permutation.weights(probs)))
            if overlap_fn is not None:
                overlap_fn()

        rows = send_to_experts(permutation.permute(tokens), overlapped)
        return DispatchedTokens(rows, weights[0], plan.tokens_per_expert, combine)

    def _dispatch_in(
        self,
        capacity: ExchangeCapacity,
        tokens: Tensor,
        probs: Tensor,
        routing_map: Tensor,
        overlap_fn: OverlapFn,
    ) -> DispatchedTokens:
        """Dispatch in fixed sizes: the host does not read the map.

        Communication: all-to-alls of equal pieces, one of e counts; the rest as in `dispatch`.
        """
        ep, expt_tp = self.ep, self.expt_tp
        sent = SentRows.of(routing_map, ep.size(), capacity.rows_per_rank, capacity.most_choices)
        plan = StaticPlan.of(sent, ep, expt_tp)
        # No other form of permutation fits: padding rows lie between the rows of ranks.
        permutation = IndexPermutation(sent.expert, sent.token, tokens.shape[0])
        weights: list[Tensor] = []

        def overlapped() -> None:
            weights.append(plan.send(permutation.weights(probs), ep, expt_tp, None))
            if overlap_fn is not None:
                overlap_fn()

        def combine(output: Tensor, overlap_fn: OverlapFn = None) -> Tensor:
            return permutation.unpermute(plan.send_back(output, ep, expt_tp, overlap_fn))

        rows = plan.send(permutation.permute(tokens), ep, expt_tp, overlapped)
        return DispatchedTokens(rows, weights[0], plan.counts, combine, sent.num_dropped)


@dataclass(frozen=True)
class _ExchangePlan:
    """The sizes of an exchange.

    sent, received: rows for and from each rank of `ep`; gathered: rows of each rank of `expt_tp`
    after the exchange; blocks: [source][local expert] rows of every sender in `tp_ep`, in order of
    arrival; tokens_per_expert: rows of each local expert. If the rank holds all experts, the lists
    are empty and the counts stay on the device.
    """

    sent: list[int]
    received: list[int]
    gathered: list[int]
    blocks: list[list[int]]
    tokens_per_expert: Sequence[int]

    @staticmethod
    def of(dispatcher: TokenDispatcher, assignments: Tensor) -> _ExchangePlan:
        """Plan the exchange of a rank with [e] assignments.

        Communication: all-gathers of e counts over `ep` and `expt_tp`.
        """
        ep, expt_tp, local = dispatcher.ep, dispatcher.expt_tp, dispatcher.num_local_experts
        ep_size, tp_size = ep.size(), expt_tp.size()
        counts = assignments.view(1, -1)
        # Gathered over the groups of the rows, so that the order of the ranks is the same.
        if ep_size > 1:
            counts = collectives.all_gather(counts, ep)
        if tp_size > 1:
            counts = collectives.all_gather(counts, expt_tp)
        own = ep.rank() * local
        if ep_size * tp_size == 1 and not is_host_memory(counts.device):
            return _ExchangePlan([], [], [], [], RowCounts(assignments))
        table = counts.tolist()  # [expt_tp * ep][e]
        blocks = [row[own : own + local] for row in table]
        mine = expt_tp.rank() * ep_size
        sums = [sum(row) for row in blocks]
        local_assignments = table[mine + ep.rank()]
        sent = [sum(local_assignments[r * local : (r + 1) * local]) for r in range(ep_size)]
        return _ExchangePlan(
            sent,
            sums[mine : mine + ep_size],
            [sum(sums[r * ep_size : (r + 1) * ep_size]) for r in range(tp_size)],
            blocks,
            [sum(column) for column in zip(*blocks, strict=True)],
        )


def transpose_blocks(rows: Tensor, counts: Sequence[Sequence[int]]) -> Tensor:
    """Reorder rows from (outer, inner) to (inner, outer).

    Args:
        counts: rows of each [outer][inner].
    """
    if len(counts) <= 1 or len(counts[0]) <= 1:
        return rows
    width = len(counts[0])
    pieces = rows.split([count for row in counts for count in row])
    return torch.cat([piece for inner in range(width) for piece in pieces[inner::width]])


@dataclass(frozen=True)
class SentRows:
    """The rows that this rank sends in an exchange of fixed sizes.

    NCCL's all-to-all takes its sizes from the host, which would wait for the router in each layer
    and micro batch. Here every rank sends c rows to each of the r ranks of `ep`; only the devices
    hold the number of rows that are tokens, and the products of experts skip the padding rows.

    Attributes:
        token, expert: int64 [r*c], token and expert of each row; arbitrary for padding rows.
        counts: int64 [r, l], rows for each expert.
        num_dropped: int64 [], choices that did not fit.
    """

    token: Tensor
    expert: Tensor
    counts: Tensor
    num_dropped: Tensor

    @staticmethod
    def of(routing_map: Tensor, num_ranks: int, rows_per_rank: int, most: int) -> SentRows:
        """Assign the choices of a router to rows, by expert and then by token.

        Args:
            routing_map: bool [t, e].
            most: upper bound on the number of choices.
        """
        num_experts = routing_map.shape[1]
        local = num_experts // num_ranks
        chosen = torch.nonzero_static(routing_map.t(), size=most)
        expert, token = chosen[:, 0], chosen[:, 1]  # -1 after the last one
        counts = routing_map.sum(0).view(num_ranks, local)
        of_rank = counts.sum(1)
        ends = counts.cumsum(1).clamp(max=rows_per_rank)
        kept = ends - torch.cat([ends.new_zeros(num_ranks, 1), ends[:, :-1]], 1)
        rank = expert.clamp(min=0) // local
        row = torch.arange(most, device=expert.device) - (of_rank.cumsum(0) - of_rank)[rank]
        fits = (expert >= 0) & (row < rows_per_rank)
        total = num_ranks * rows_per_rank
        place = torch.where(fits, rank * rows_per_rank + row, total)
        found = expert.new_zeros(2, total + 1)
        found.scatter_(1, place.expand(2, -1), torch.stack([token, expert]))
        return SentRows(found[0, :-1], found[1, :-1], kept, (of_rank - kept.sum(1)).sum())


@dataclass(frozen=True)
class StaticPlan:
    """The permutation of received rows by expert, and its inverse.

    Attributes:
        counts: tokens of each local expert.
        order: int64 [q*c], index of the received row at each place of the order by expert.
        is_row: bool [q*c], whether a token is at that place.
        target, is_token: the inverse: the place of each received row, and whether it is a token.
    """

    sent: SentRows
    counts: RowCounts
    order: Tensor
    is_row: Tensor
    target: Tensor
    is_token: Tensor

    @staticmethod
    def of(sent: SentRows, ep: Group, expt_tp: Group) -> StaticPlan:
        """Exchange the number of tokens of each expert.

        Communication: an all-to-all of e counts over `ep`, an all-gather over `expt_tp`.
        """
        rows_per_rank = sent.token.shape[0] // ep.size()
        counts = sent.counts
        if ep.size() > 1:
            counts = collectives.all_to_all(counts, ep)
        if expt_tp.size() > 1:
            counts = collectives.all_gather(counts, expt_tp)
        num_sources, local = counts.shape
        total = num_sources * rows_per_rank
        ends = counts.cumsum(1)
        row = torch.arange(rows_per_rank, device=counts.device).expand(num_sources, -1)
        expert = torch.searchsorted(ends, row.contiguous(), right=True)
        is_token = expert < local
        by_expert = counts.t().reshape(-1)
        begins = (by_expert.cumsum(0) - by_expert).view(local, num_sources).t()
        shift = begins - (ends - counts)
        target = shift.gather(1, expert.clamp(max=local - 1)) + row
        target = torch.where(is_token, target, total).view(-1)
        order = target.new_zeros(total + 1)
        order.scatter_(0, target, torch.arange(total, device=target.device))
        is_row = torch.arange(total, device=target.device) < counts.sum()
        return StaticPlan(
            sent,
            RowCounts(counts.sum(0)),
            order[:-1],
            is_row,
            target.clamp(max=total - 1),
            is_token.view(-1),
        )

    def send(self, values: Tensor, ep: Group, expt_tp: Group, overlap_fn: OverlapFn) -> Tensor:
        """Send rows [r*c, ...] to their experts: [q*c, ...], by expert, padding rows zero."""
        received = mappings.all_to_all(ep, values, overlap_fn=overlap_fn)
        received = mappings.gather_from_sequence_parallel_region(received, group=expt_tp)
        return _where(self.is_row, received.index_select(0, self.order))

    def send_back(self, values: Tensor, ep: Group, expt_tp: Group, overlap_fn: OverlapFn) -> Tensor:
        """Undo `send` of rows [q*c, ...], with sums over `expt_tp`; padding rows are not read."""
        rows = _where(self.is_token, values.index_select(0, self.target))
        rows = mappings.reduce_scatter_to_sequence_parallel_region(rows, expt_tp)
        return mappings.all_to_all(ep, rows, overlap_fn=overlap_fn)


def _where(mask: Tensor, rows: Tensor) -> Tensor:
    """Return rows [n, ...] where the mask [n] is True, else zeros (NaN times zero would be NaN)."""
    shape = mask.shape + (1,) * (rows.dim() - 1)
    return rows.masked_fill(mask.logical_not().view(shape), 0.0)
