"""Muon: momentum whose matrices are orthogonalised before they are applied.

K. Jordan et al., "Muon: An optimizer for hidden layers in neural networks" (2024); at scale:
J. Liu et al., "Muon is Scalable for LLM Training", section 2, arXiv 2502.16982.

The momentum is elementwise, and the owner of a shard stores it, like Adam's moments. Only the
update of a step needs the whole matrix: `MuonRedistribute` assembles each matrix on one of the
data-parallel ranks (chosen by the cost of the orthogonalisation), which orthogonalises it and sends
the pieces back to the owners of the weights. Ranks that hold whole matrices exchange results only.
State is sharded and checkpointed as for any other optimizer, the replicas share the work at every
ZeRO stage, and every stage gives the same bits.

Orthogonalisation uses matrix products alone (section "Newton-Schulz" of Jordan et al.; N. Higham,
"Functions of Matrices", section 8.3). The iteration

    X <- a X + b (X X^T) X + c (X X^T)^2 X

drives every singular value of X towards 1 and leaves the singular vectors unchanged. With the
coefficients `QUINTIC` five steps bring singular values of 0.01 and more into about [0.7, 1.2],
which is as good as 1 for an update.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from megatron.core.distributed.communication import Mesh
from megatron.core.distributed.parameter_shard import MainParamShard
from megatron.core.foundation.device import computes_fast_in_bf16
from megatron.core.optimizer.definition import EagerOptimizer, UpdateSettings
from megatron.core.parameters.param_meta import ParamMeta, get_param_meta, shard_of, unshard
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.topology.group import SINGLE_RANK, Group
from megatron.core.transport import torch_collectives
from megatron.core.transport.collectives import all_gather, all_to_all
from megatron.core.transport.object_collectives import all_gather_object

ROUND_NUMEL = 1 << 25
"""Elements of the matrices that are exchanged at a time: bounds the memory of the exchange."""
QUINTIC = (3.4445, -4.7750, 2.0315)
"""Coefficients a, b, c: the steepest slope at 0 that keeps singular values near 1."""


def is_muon_matrix(parameter: nn.Parameter) -> bool:
    """Return whether a parameter is a weight matrix of a hidden layer."""
    return parameter.dim() == 2 and not get_param_meta(parameter).is_embedding_or_output


class Muon(EagerOptimizer):
    """Updates matrices, or the shards of them that this rank owns."""

    def __init__(
        self,
        param_groups: Sequence[dict[str, object]],
        shards: Sequence[MainParamShard],
        matrices: Sequence[nn.Parameter],
        groups: ProcessGroupCollection,
        meshes: tuple[Mesh, Mesh],
        settings: UpdateSettings,
    ) -> None:
        """
        Args:
            param_groups: over the `main` tensors of `shards`.
            shards: this rank's pieces of `matrices`.
            matrices: all matrices of this model-parallel rank, in one order on all its replicas.
            meshes: the replicas of dense and of expert parameters.
        """
        defaults = {"lr": settings.lr or 0.0, "weight_decay": settings.weight_decay}
        super().__init__(list(param_groups), defaults)
        self.settings, self._groups = settings, groups
        self._exchanges = []
        for is_expert, mesh in zip((False, True), meshes, strict=True):
            kind = [p for p in matrices if get_param_meta(p).is_expert == is_expert]
            if kind:
                ids = {id(p) for p in kind}
                mine = [item for item in shards if id(item.shard.parameter) in ids]
                self._exchanges.append(MuonRedistribute(mine, kind, mesh))

    def initialize_state(self) -> None:
        """Allocate the momentum that the first update would allocate."""
        for group in self.param_groups:
            for main in group["params"]:
                if "momentum_buffer" not in self.state[main]:
                    self.state[main]["momentum_buffer"] = torch.zeros_like(main)

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
        """Update every shard that has a gradient.

        Communication: two all-to-alls over the data-parallel ranks per round of matrices, and the
        collectives of `muon_tp_mode` over the tensor-parallel ranks.
        """
        if closure is not None:
            raise TypeError(f"{type(self).__name__}.step() takes no closure: gradients are ready")
        self.initialize_state()
        settings_of = {id(main): g for g in self.param_groups for main in g["params"]}
        for exchange in self._exchanges:
            for shard, update in exchange.run(self._direction, self._full_update):
                group = settings_of[id(shard.main_param)]
                shard.main_param.mul_(1.0 - group["lr"] * group["weight_decay"])
                shard.main_param.view(-1).add_(update, alpha=-group["lr"])

    def _direction(self, item: MainParamShard) -> Tensor:
        """Advance the momentum, and return the direction to orthogonalise, flat."""
        gradient = item.main_param.grad
        if gradient is None:
            return torch.zeros_like(item.main_param).view(-1)
        momentum = self.state[item.main_param]["momentum_buffer"]
        momentum.lerp_(gradient, 1.0 - self.settings.muon_momentum)
        if self.settings.muon_use_nesterov:
            return torch.lerp(gradient, momentum, self.settings.muon_momentum).view(-1)
        return momentum.clone().view(-1)

    def _full_update(self, parameter: nn.Parameter, direction: Tensor) -> Tensor:
        """Turn the direction of a parameter, of its shape, into its update."""
        meta = get_param_meta(parameter)
        tp = self._groups.expt_tp if meta.is_expert else self._groups.tp
        if meta.split_dim is None or tp.size() == 1:
            return self._fused_update(direction, meta, SINGLE_RANK)
        if self.settings.muon_tp_mode != "duplicated":
            return self._fused_update(direction, meta, tp)
        parts = all_gather(direction.contiguous(), tp).chunk(tp.size())
        update = self._fused_update(unshard(parts, meta), meta, SINGLE_RANK)
        return shard_of(update, meta, tp.rank(), tp.size())

    def _fused_update(self, direction: Tensor, meta: ParamMeta, tp: Group) -> Tensor:
        """Orthogonalise each of the matrices that are stacked in one parameter.

        Args:
            tp: the ranks that hold the other parts; its size is 1 for a matrix that is not split.
        """
        rank, size = tp.rank(), tp.size()
        num_rows, num_columns = direction.shape
        if meta.split_dim == 1:
            num_columns *= size
        first_row = 0
        if meta.split_dim == 0:
            first_row, num_rows = rank * num_rows, num_rows * size
        heights, owners = self._stack(meta, num_rows, first_row, direction.shape[0])
        update = torch.empty_like(direction)
        for number, height in enumerate(heights):
            mine = (owners == number).nonzero().view(-1)
            part = direction if len(heights) == 1 else direction[mine]
            if self.settings.muon_tp_mode == "distributed":
                part = orthogonalize(
                    part, self.settings.muon_num_ns_steps, split_dim=meta.split_dim, group=tp
                )
                shape = (height, num_columns)
            else:
                if part.numel():
                    part = orthogonalize(part, self.settings.muon_num_ns_steps, group=SINGLE_RANK)
                shape = (max(1, part.shape[0]), part.shape[1])
            scale = (
                update_scale(*shape, self.settings.muon_scale_mode)
                * self.settings.muon_extra_scale_factor
            )
            update[mine] = part.mul_(scale)
        return update

    def _stack(
        self, meta: ParamMeta, num_rows: int, first_row: int, num_local: int
    ) -> tuple[list[int], Tensor]:
        """Return the heights of the stacked matrices, and the index of the matrix of each row."""
        rows = torch.arange(num_local)
        if not self.settings.muon_split_qkv:
            return [num_rows], torch.zeros_like(rows)
        if meta.stride > 1 and meta.split_dim == 0:
            return [num_rows // meta.stride] * meta.stride, rows // (num_local // meta.stride)
        pattern = meta.fused_row_sizes or (num_rows,)
        ends = torch.tensor(pattern).cumsum(0)
        period = int(ends[-1])
        owners = torch.searchsorted(ends, (rows + first_row) % period, right=True)
        return [height * (num_rows // period) for height in pattern], owners


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
    """Whole matrices from shards, each on one rank: which rank holds and computes each."""

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
            direction_of: the direction of a shard, flat [n].
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
        """Send pieces along (piece, from, to); return the pieces that this rank receives."""
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


def orthogonalize(
    matrix: Tensor, num_steps: int = 5, *, split_dim: int | None = None, group: Group
) -> Tensor:
    """Return the matrix with its singular values moved to about 1.

    Args:
        matrix: [m, n], fp32; or this rank's rows (split_dim 0) or columns (split_dim 1) of it.
        group: the ranks that hold the other parts; its size is 1 if the matrix is not split.
    Returns:
        of the shape of `matrix`, fp32.
    Communication:
        for a split matrix, an all-reduce of one number and, in each step, of the Gram matrix over
        the dimension that is not split.
    """
    is_split = split_dim is not None and group.size() > 1
    transposes = split_dim == 0 if is_split else matrix.shape[0] > matrix.shape[1]
    # Work on [k, l] with the Gram matrix [k, k] over k: the shorter side, or the unsplit one.
    x = (matrix.T if transposes else matrix).contiguous()
    square = x.square().sum()
    if is_split:
        torch_collectives.all_reduce(square, group)
    x = x / square.sqrt().clamp_min(1e-7)
    # bf16 is accurate enough for an iteration that corrects itself, and fast on accelerators.
    x = x.bfloat16() if computes_fast_in_bf16(x.device) else x
    a, b, c = QUINTIC
    for _ in range(num_steps):
        gram = x @ x.T
        if is_split:
            torch_collectives.all_reduce(gram, group)
        x = torch.addmm(x, torch.addmm(gram, gram, gram, beta=b, alpha=c), x, beta=a)
    return (x.T if transposes else x).float().contiguous()


def update_scale(num_rows: int, num_columns: int, mode: str) -> float:
    """Return the factor on an orthogonal update of a weight [num_rows, num_columns].

    Args:
        mode: "spectral": sqrt(max(rows, columns)); the root mean square of an update is then 1, and
            0.2 of it moves weights as Adam does (J. Liu et al., "Muon is Scalable for LLM
            Training", section 2.2, arXiv 2502.16982). "unit_rms_norm": sqrt(rows / columns), which
            changes outputs of unit size by outputs of unit size (J. Bernstein, "Deriving Muon").
            "shape_scaling": sqrt(max(1, rows / columns)), as Muon was published.
    """
    if mode == "spectral":
        return math.sqrt(max(num_rows, num_columns))
    if mode == "unit_rms_norm":
        return math.sqrt(num_rows / num_columns)
    return math.sqrt(max(1.0, num_rows / num_columns))
