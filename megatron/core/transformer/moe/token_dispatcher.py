"""How tokens travel to the ranks that hold their experts, and back.

Every rank of a stage holds tokens of its own. Those of one `tp_ep` group together hold all experts
once: the experts are distributed over `ep`, and each is split over `expt_tp`. A dispatcher brings
every token to all shards of its experts, and sums what comes back; layers between know nothing
of other ranks. Expert parallelism: D. Lepikhin et al., "GShard", section 3.3, arXiv 2006.16668.

Legend: t tokens of this rank, h hidden, e experts, l experts of this rank, n rows for its experts.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from megatron.core.process_groups_config import Group, ProcessGroupCollection, resolve_groups
from megatron.core.tensor_parallel import mappings
from megatron.core.transport import collectives
from megatron.core.utils import get_pg_rank, get_pg_size

Meanwhile = Callable[[], None] | None
"""What a rank computes while its tokens are in flight."""


class Combine(Protocol):
    """The way back from the experts."""

    def __call__(self, output: Tensor, meanwhile: Meanwhile = None) -> Tensor:
        """Return the weighted sums [t, h] of what the experts made [n, h]."""


@dataclass(frozen=True)
class Dispatched:
    """What reached the experts of this rank.

    Attributes:
        tokens: [n, h], those of the first local expert first.
        probs: [n], the weight of each row in its token's output.
        num_rows: rows of each local expert.
        combine: from the experts' output [n, h] (partial over `expt_tp`) to the weighted sums
            [t, h] of this rank's own tokens; it takes `meanwhile` as `dispatch` does.
    """

    tokens: Tensor
    probs: Tensor
    num_rows: list[int]
    combine: Combine


class TokenDispatcher(Protocol):
    """The interface between a router and its experts."""

    def dispatch(
        self, tokens: Tensor, probs: Tensor, routing_map: Tensor, meanwhile: Meanwhile = None
    ) -> Dispatched:
        """Bring tokens [t, h] to their experts.

        Args:
            probs: [t, e], weights; routing_map: bool [t, e], visits.
            meanwhile: called once, while the tokens travel where the dispatcher can, else before.
        """


def padded(sent: Dispatched, num_rows: int) -> Dispatched:
    """Give every expert `num_rows` rows, zeros after its own: shapes that do not change.

    Args:
        num_rows: as many as an expert can get, at least.
    """
    counts = torch.tensor(sent.num_rows, device=sent.tokens.device)
    experts = torch.arange(len(sent.num_rows), device=counts.device)
    begins = experts * num_rows - (counts.cumsum(0) - counts)
    shift = begins.repeat_interleave(counts, output_size=sent.tokens.shape[0])
    place = shift + torch.arange(sent.tokens.shape[0], device=counts.device)
    total = len(sent.num_rows) * num_rows
    return Dispatched(
        sent.tokens.new_zeros((total, sent.tokens.shape[1])).index_copy(0, place, sent.tokens),
        sent.probs.new_zeros(total).index_copy(0, place, sent.probs),
        [num_rows] * len(sent.num_rows),
        lambda output, meanwhile=None: sent.combine(output.index_select(0, place), meanwhile),
    )


def rows_by_expert(routing_map: Tensor) -> tuple[Tensor, Tensor]:
    """Return (expert, token) of every visit, int64 [n] each: by expert, then by token."""
    visits = routing_map.t().nonzero()
    return visits[:, 0], visits[:, 1]


def sum_by_token(rows: Tensor, token_of_row: Tensor, num_tokens: int) -> Tensor:
    """Add rows [n, h] of the same token: [t, h], zeros where a token has none."""
    return rows.new_zeros((num_tokens, rows.shape[1])).index_add(0, token_of_row, rows)


class _Dispatcher:
    """Groups, and the numbers of the experts of this rank.

    Args:
        num_local_experts: experts of this rank.
        local_expert_indices: their numbers in the model, consecutive.
    """

    def __init__(
        self,
        num_local_experts: int,
        local_expert_indices: Sequence[int],
        pg_collection: ProcessGroupCollection | None = None,
    ) -> None:
        groups = resolve_groups(pg_collection)
        self.num_local_experts = num_local_experts
        self.local_expert_indices = list(local_expert_indices)
        self.ep, self.expt_tp, self.tp_ep = groups.ep, groups.expt_tp, groups.tp_ep


class MoEAllGatherTokenDispatcher(_Dispatcher):
    """Every rank of `tp_ep` receives all tokens of the group and keeps those of its experts.

    Communication: all-gathers of t * h activations and t * e weights over `tp_ep`, and a
    reduce-scatter of the output; backward the reverse. All ranks have equally many tokens.
    """

    def dispatch(
        self, tokens: Tensor, probs: Tensor, routing_map: Tensor, meanwhile: Meanwhile = None
    ) -> Dispatched:
        """See `TokenDispatcher`; computes nothing while tokens travel."""
        if meanwhile is not None:
            meanwhile()
        group = self.tp_ep
        tokens = mappings.gather_from_sequence_parallel_region(tokens, group=group)
        probs = mappings.gather_from_sequence_parallel_region(probs, group=group)
        if get_pg_size(group) > 1:
            marks = collectives.all_gather(routing_map.to(torch.uint8), group)
            routing_map = marks.bool()
        first = self.local_expert_indices[0]
        local_map = routing_map[:, first : first + self.num_local_experts]
        expert, token = rows_by_expert(local_map)
        num_tokens = tokens.shape[0]

        def combine(output: Tensor, meanwhile: Meanwhile = None) -> Tensor:
            if meanwhile is not None:
                meanwhile()
            summed = sum_by_token(output, token, num_tokens)
            return mappings.reduce_scatter_to_sequence_parallel_region(summed, group)

        return Dispatched(
            tokens.index_select(0, token),
            probs[token, expert + first],
            local_map.sum(0).tolist(),
            combine,
        )


class MoEAlltoAllTokenDispatcher(_Dispatcher):
    """Each rank sends a token once for each of its experts, to the rank that holds it.

    Communication: an all-gather of e counts over `tp_ep`; all-to-alls of the visits' activations
    and weights over `ep`, an all-gather over `expt_tp`, and both reversed for the output.
    """

    def dispatch(
        self, tokens: Tensor, probs: Tensor, routing_map: Tensor, meanwhile: Meanwhile = None
    ) -> Dispatched:
        """See `TokenDispatcher`."""
        expert, token = rows_by_expert(routing_map)
        num_tokens = tokens.shape[0]
        plan = _ExchangePlan.of(self, routing_map.sum(0))

        def bring(values: Tensor, meanwhile: Meanwhile = None) -> Tensor:
            received = plan.gather(plan.send(values, self.ep, meanwhile), self.expt_tp)
            return plan.by_expert(received)

        def combine(output: Tensor, meanwhile: Meanwhile = None) -> Tensor:
            summed = plan.scatter(plan.by_source(output), self.expt_tp)
            back = plan.send_back(summed, self.ep, meanwhile)
            return sum_by_token(back, token, num_tokens)

        weights: list[Tensor] = []

        def beside_rows() -> None:
            weights.append(bring(probs[token, expert]))
            if meanwhile is not None:
                meanwhile()

        rows = bring(tokens.index_select(0, token), beside_rows)
        return Dispatched(rows, weights[0], plan.num_rows, combine)


@dataclass(frozen=True)
class _ExchangePlan:
    """How many rows go where.

    sent, received: rows for and from each rank of `ep`; gathered: rows of each rank of `expt_tp`
    after the exchange; blocks: [source][local expert] rows of every sender in `tp_ep`, in the
    order in which they arrive.
    """

    sent: list[int]
    received: list[int]
    gathered: list[int]
    blocks: list[list[int]]

    @staticmethod
    def of(dispatcher: _Dispatcher, visits: Tensor) -> _ExchangePlan:
        """Plan the exchange of a rank whose tokens make [e] visits. Communication: see above."""
        ep, expt_tp, local = dispatcher.ep, dispatcher.expt_tp, dispatcher.num_local_experts
        ep_size, tp_size = get_pg_size(ep), get_pg_size(expt_tp)
        counts = visits.view(1, -1)
        # The counts travel the way of the rows, so that the order of the ranks is the same.
        if ep_size > 1:
            counts = collectives.all_gather(counts, ep)
        if tp_size > 1:
            counts = collectives.all_gather(counts, expt_tp)
        own = get_pg_rank(ep) * local
        table = counts.tolist()  # [expt_tp * ep][e]
        blocks = [row[own : own + local] for row in table]
        mine = get_pg_rank(expt_tp) * ep_size
        sums = [sum(row) for row in blocks]
        visits_of_me = table[mine + get_pg_rank(ep)]
        sent = [sum(visits_of_me[r * local : (r + 1) * local]) for r in range(ep_size)]
        return _ExchangePlan(
            sent,
            sums[mine : mine + ep_size],
            [sum(sums[r * ep_size : (r + 1) * ep_size]) for r in range(tp_size)],
            blocks,
        )

    @property
    def num_rows(self) -> list[int]:
        """Rows of each local expert."""
        return [sum(column) for column in zip(*self.blocks, strict=True)]

    def send(self, rows: Tensor, ep: Group, meanwhile: Meanwhile = None) -> Tensor:
        """Exchange rows over `ep`."""
        return mappings.all_to_all(ep, rows, self.received, self.sent, meanwhile)

    def send_back(self, rows: Tensor, ep: Group, meanwhile: Meanwhile = None) -> Tensor:
        """Undo `send`."""
        return mappings.all_to_all(ep, rows, self.sent, self.received, meanwhile)

    def gather(self, rows: Tensor, expt_tp: Group) -> Tensor:
        """Collect the rows of all ranks that hold a shard of the same experts."""
        return mappings.gather_from_sequence_parallel_region(
            rows, group=expt_tp, output_split_sizes=self.gathered
        )

    def scatter(self, rows: Tensor, expt_tp: Group) -> Tensor:
        """Sum the shards' outputs, each rank keeping the rows that it brought."""
        return mappings.reduce_scatter_to_sequence_parallel_region(rows, expt_tp, self.gathered)

    def by_expert(self, rows: Tensor) -> Tensor:
        """Put rows that lie by source and expert in order of the experts."""
        return _inner_first(rows, self.blocks)

    def by_source(self, rows: Tensor) -> Tensor:
        """Undo `by_expert`."""
        return _inner_first(rows, list(zip(*self.blocks, strict=True)))


def _inner_first(rows: Tensor, counts: Sequence[Sequence[int]]) -> Tensor:
    """Reorder rows that lie by (outer, inner) to lie by (inner, outer).

    Args:
        counts: rows of each [outer][inner].
    """
    width = len(counts[0])
    if len(counts) == 1 or width == 1:
        return rows
    pieces = rows.split([count for row in counts for count in row])
    return torch.cat([piece for inner in range(width) for piece in pieces[inner::width]])


DISPATCHERS: dict[str, Callable[..., TokenDispatcher]] = {
    "allgather": MoEAllGatherTokenDispatcher,
    "alltoall": MoEAlltoAllTokenDispatcher,
}
