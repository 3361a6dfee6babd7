"""Send tokens to the ranks that hold their experts, and the outputs back.

Every rank of a stage holds different tokens. The ranks of a `tp_ep` group together hold all experts
once: the experts are distributed over `ep`, and each expert is split over `expt_tp`. A dispatcher
sends every token to all shards of its experts, and sums their outputs; the experts themselves do
not communicate. Expert parallelism: D. Lepikhin et al., "GShard", section 3.3, arXiv 2006.16668.

Legend: t tokens of this rank, h hidden, e experts, l experts of this rank, n rows for its experts.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from megatron.core.foundation.device import is_host_memory
from megatron.core.kernels.permutation import PERMUTATION, PLACES, IndexPermutation, Permutation
from megatron.core.kernels.registry import Request
from megatron.core.kernels.row_counts import RowCounts, counts_on_device, group_of_row
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.tensor_parallel import mappings
from megatron.core.topology.group import Group
from megatron.core.transformer.moe.static_exchange import OverlapFn, SentRows, StaticPlan
from megatron.core.transport import collectives


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
        num_local_experts: int,
        local_expert_indices: Sequence[int],
        groups: ProcessGroupCollection,
    ) -> None:
        self.num_local_experts = num_local_experts
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


def pad_to_capacity(sent: DispatchedTokens, capacity: int) -> DispatchedTokens:
    """Give every expert `capacity` rows, zeros after its own: shapes that do not change.

    Args:
        capacity: at least the most rows that an expert can receive.
    """
    counts = counts_on_device(sent.tokens_per_expert, sent.tokens.device)
    num_experts, num_rows = len(sent.tokens_per_expert), sent.tokens.shape[0]
    group = group_of_row(counts, num_rows)
    begins = torch.arange(num_experts, device=counts.device) * capacity
    shift = begins - (counts.cumsum(0) - counts)
    total = num_experts * capacity
    position = F.pad(shift, (0, 1))[group] + torch.arange(num_rows, device=counts.device)
    # Padding rows are written to one extra slot at the end, which is dropped.
    spare = int(isinstance(sent.tokens_per_expert, RowCounts))
    position = torch.where(group < num_experts, position, total) if spare else position
    places = PLACES.choose(Request.of(sent.tokens)).kernel.run(position, total + spare)
    weights = sent.probs.new_zeros(total + spare).index_copy(0, position, sent.probs)
    return DispatchedTokens(
        places.put(sent.tokens)[:total],
        weights[:total],
        [capacity] * num_experts,
        lambda output, overlap_fn=None: sent.combine(
            places.take(F.pad(output, (0, 0, 0, spare))), overlap_fn
        ),
        sent.num_dropped,
    )


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
        permutation = permutation_of(tokens, routing_map, num_assignments)
        plan = _ExchangePlan.of(self, routing_map.sum(0))

        def send_to_experts(values: Tensor, overlap_fn: OverlapFn = None) -> Tensor:
            received = plan.gather(plan.send(values, self.ep, overlap_fn), self.expt_tp)
            return plan.by_expert(received)

        def combine(output: Tensor, overlap_fn: OverlapFn = None) -> Tensor:
            summed = plan.scatter(plan.by_source(output), self.expt_tp)
            back = plan.send_back(summed, self.ep, overlap_fn)
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

    def send(self, rows: Tensor, ep: Group, overlap_fn: OverlapFn = None) -> Tensor:
        """Exchange rows over `ep`."""
        return mappings.all_to_all(ep, rows, self.received, self.sent, overlap_fn)

    def send_back(self, rows: Tensor, ep: Group, overlap_fn: OverlapFn = None) -> Tensor:
        """Undo `send`."""
        return mappings.all_to_all(ep, rows, self.sent, self.received, overlap_fn)

    def gather(self, rows: Tensor, expt_tp: Group) -> Tensor:
        """Collect the rows of all ranks that hold a shard of the same experts."""
        return mappings.gather_from_sequence_parallel_region(
            rows, group=expt_tp, output_split_sizes=self.gathered
        )

    def scatter(self, rows: Tensor, expt_tp: Group) -> Tensor:
        """Sum the shards' outputs; each rank keeps the rows that it contributed to `gather`."""
        return mappings.reduce_scatter_to_sequence_parallel_region(rows, expt_tp, self.gathered)

    def by_expert(self, rows: Tensor) -> Tensor:
        """Reorder rows from (source, expert) to (expert, source)."""
        return _transpose_blocks(rows, self.blocks)

    def by_source(self, rows: Tensor) -> Tensor:
        """Undo `by_expert`."""
        return _transpose_blocks(rows, list(zip(*self.blocks, strict=True)))


def _transpose_blocks(rows: Tensor, counts: Sequence[Sequence[int]]) -> Tensor:
    """Reorder rows from (outer, inner) to (inner, outer).

    Args:
        counts: rows of each [outer][inner].
    """
    if len(counts) <= 1 or len(counts[0]) == 1:
        return rows
    width = len(counts[0])
    pieces = rows.split([count for row in counts for count in row])
    return torch.cat([piece for inner in range(width) for piece in pieces[inner::width]])
