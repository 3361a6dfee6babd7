"""Whole matrices out of shards, each on one rank, and back.

A matrix whose state is sharded is in pieces on several data-parallel ranks. An optimizer that
needs all of it at once (Muon) runs here: matrices are dealt out to the ranks by the cost of their
orthogonalisation, pieces travel to the matrix's rank and its result travels back. Where every
rank holds whole matrices anyway, only results travel.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from megatron.core.distributed.communication import Mesh
from megatron.core.optimizer.main_param_shard import MainParamShard
from megatron.core.transport.collectives import all_to_all
from megatron.core.transport.object_collectives import all_gather_object

ROUND_NUMEL = 1 << 25
"""Elements of the matrices that travel at a time: bounds the memory of the exchange."""


@dataclass(frozen=True)
class _Piece:
    """[begin, end) of a flattened matrix on one rank."""

    matrix: int
    begin: int
    end: int
    holder: int


def assign_owners(costs: Sequence[float], num_ranks: int) -> list[int]:
    """Return the rank of each job: the most expensive first, each to the least loaded rank."""
    load = [0.0] * num_ranks
    ranks = [0] * len(costs)
    for job in sorted(range(len(costs)), key=lambda j: (-costs[j], j)):
        ranks[job] = min(range(num_ranks), key=lambda rank: (load[rank], rank))
        load[ranks[job]] += costs[job]
    return ranks


class MuonRedistribute:
    """The plan of who holds and who computes what, made once."""

    def __init__(
        self, shards: Sequence[MainParamShard], matrices: Sequence[nn.Parameter], mesh: Mesh
    ) -> None:
        """
        Args:
            shards: this rank's pieces of `matrices`.
            matrices: in one order on all replicas; there is at least one.
            mesh: the replicas. The work is shared by the ranks of a shard axis if there is one,
                and by all copies otherwise.
        Communication: one all-gather of small Python objects over the ranks of the mesh.
        """
        self._matrices = list(matrices)
        number = {id(p): i for i, p in enumerate(matrices)}
        self._shards = {
            (number[id(item.shard.parameter)], item.shard.begin): item for item in shards
        }
        self._is_sharded = mesh.shard_size > 1
        self._group = mesh.shard if self._is_sharded else mesh.replicate
        mine = [(m, begin, item.shard.end) for (m, begin), item in self._shards.items()]
        everyone = [mine]
        self._rank, size = self._group.rank(), self._group.size()
        if size > 1:
            everyone = all_gather_object(mine, self._group)
        self._pieces = sorted(
            (_Piece(*position, holder) for holder, its in enumerate(everyone) for position in its),
            key=lambda piece: (piece.matrix, piece.begin, piece.holder),
        )
        costs = [float(p.numel()) * min(p.shape) for p in matrices]
        self._owners = assign_owners(costs, size)
        self._rounds = _rounds([p.numel() for p in matrices])

    def run(
        self,
        direction_of: Callable[[MainParamShard], Tensor],
        full_update: Callable[[nn.Parameter, Tensor], Tensor],
    ) -> Iterator[tuple[MainParamShard, Tensor]]:
        """Yield (shard, its part [n] of the update) for all shards of this rank.

        Args:
            direction_of: what a shard contributes, flat [n].
            full_update: turns an assembled direction of the parameter's shape into its update.
        Communication: two all-to-alls per round; one where every rank holds whole matrices.
        """
        for matrices in self._rounds:
            pieces = [piece for piece in self._pieces if piece.matrix in matrices]
            held = [piece for piece in pieces if piece.holder == self._rank]
            directions = {p: direction_of(self._shards[p.matrix, p.begin]) for p in held}
            sent = [p for p in pieces if self._is_sharded or p.holder == self._owners[p.matrix]]
            arrived = self._exchange(
                [(p, p.holder, self._owners[p.matrix]) for p in sent], directions
            )
            updates: dict[int, Tensor] = {}
            for matrix in matrices:
                if self._owners[matrix] == self._rank:
                    parts = [arrived[p] for p in sent if p.matrix == matrix]
                    parameter = self._matrices[matrix]
                    full = torch.cat(parts).view(parameter.shape)
                    updates[matrix] = full_update(parameter, full).reshape(-1)
            results = {p: updates[p.matrix][p.begin : p.end] for p in pieces if p.matrix in updates}
            returned = self._exchange(
                [(p, self._owners[p.matrix], p.holder) for p in pieces], results
            )
            for piece in held:
                yield self._shards[piece.matrix, piece.begin], returned[piece]

    def _exchange(
        self, routes: Sequence[tuple[_Piece, int, int]], data: dict[_Piece, Tensor]
    ) -> dict[_Piece, Tensor]:
        """Send pieces along (piece, from, to); return those that are for this rank."""
        if all(source == target for _, source, target in routes):
            return {piece: data[piece] for piece, _, target in routes if target == self._rank}
        size = self._group.size()
        outgoing = [[p for p, s, t in routes if s == self._rank and t == r] for r in range(size)]
        incoming = [[p for p, s, t in routes if t == self._rank and s == r] for r in range(size)]
        flat = [data[piece] for its in outgoing for piece in its]
        device = self._matrices[0].device
        assert self._group is not None
        received = all_to_all(
            torch.cat(flat) if flat else torch.empty(0, device=device),
            self._group,
            [sum(p.end - p.begin for p in its) for its in incoming],
            [sum(p.end - p.begin for p in its) for its in outgoing],
        )
        order = [piece for its in incoming for piece in its]
        parts = received.split([p.end - p.begin for p in order])
        return dict(zip(order, parts, strict=True))


def _rounds(numels: Sequence[int]) -> list[range]:
    """Cut the matrices into runs of about `ROUND_NUMEL` elements."""
    rounds, begin, total = [], 0, 0
    for number, numel in enumerate(numels):
        if total and total + numel > ROUND_NUMEL:
            rounds.append(range(begin, number))
            begin, total = number, 0
        total += numel
    if numels:
        rounds.append(range(begin, len(numels)))
    return rounds
