"""An exchange of tokens in sizes that are fixed before the router has chosen.

NCCL's all-to-all takes its sizes from the host, which therefore waits for the router, in each layer
and micro batch. Here every rank sends the same number of rows to every rank; only the devices hold
the number of rows that are tokens, and the products of experts skip the padding rows.

Legend: t tokens of this rank, h hidden, e experts, r ranks of `ep`, l = e/r experts of a rank, c
rows that a rank sends to another, q ranks that send to this one (of `ep` times `expt_tp`).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from megatron.core.kernels.row_counts import RowCounts
from megatron.core.tensor_parallel import mappings
from megatron.core.topology.group import Group
from megatron.core.transport import collectives

OverlapFn = Callable[[], None] | None
"""Computation that runs while tokens are in flight."""


@dataclass(frozen=True)
class SentRows:
    """The rows that this rank sends.

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
        """Undo `send`, with sums over `expt_tp`. Padding rows are not read."""
        rows = _where(self.is_token, values.index_select(0, self.target))
        rows = mappings.reduce_scatter_to_sequence_parallel_region(rows, expt_tp)
        return mappings.all_to_all(ep, rows, overlap_fn=overlap_fn)


def _where(mask: Tensor, rows: Tensor) -> Tensor:
    """Return rows [n, ...] where the mask [n] is True, else zeros (NaN times zero would be NaN)."""
    shape = mask.shape + (1,) * (rows.dim() - 1)
    return rows.masked_fill(mask.logical_not().view(shape), 0.0)
