"""Muon: momentum whose matrices are orthogonalised before they are applied.

K. Jordan et al., "Muon: An optimizer for hidden layers in neural networks" (2024); at scale:
J. Liu et al., "Muon is Scalable for LLM Training", section 2, arXiv 2502.16982.

The momentum is elementwise and stays where Adam's moments would be: on the owner of the shard.
Only the update of a step must be seen as a whole matrix, so that is what travels: each matrix is
assembled on one of the data-parallel ranks, orthogonalised there, and its pieces go back to the
owners of the weights. State is sharded and checkpointed as that of any other optimizer, the work is
divided over the replicas at every ZeRO stage, and every stage gives the same bits.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from megatron.core.distributed.communication import Mesh
from megatron.core.optimizer.eager import EagerOptimizer
from megatron.core.optimizer.main_param_shard import MainParamShard
from megatron.core.optimizer.muon_redistribute import MuonRedistribute
from megatron.core.optimizer.newton_schulz import orthogonalize, update_scale
from megatron.core.parameters.param_meta import ParamMeta, get_param_meta, shard_of, unshard
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.topology.group import SINGLE_RANK, Group
from megatron.core.transport.collectives import all_gather


@dataclass(frozen=True, kw_only=True)
class MuonSettings:
    """How updates are computed."""

    momentum: float = 0.9
    uses_nesterov: bool = False
    num_ns_steps: int = 5
    scale_mode: str = "spectral"
    extra_scale: float = 1.0
    tp_mode: str = "duplicated"
    """A matrix that is split over tensor-parallel ranks: every rank forms the whole one
    ("duplicated"), each step of the iteration adds Gram matrices ("distributed"), or each rank
    orthogonalises its own part ("blockwise", which is another update and needs no messages)."""
    splits_fused: bool = True
    """Treat q, k and v, and the two halves of a gated layer, as matrices of their own."""


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
        settings: MuonSettings,
        *,
        lr: float = 0.0,
        weight_decay: float = 0.0,
    ) -> None:
        """
        Args:
            param_groups: over the `main` tensors of `shards`.
            shards: this rank's pieces of `matrices`.
            matrices: all matrices of this model-parallel rank, in one order on all its replicas.
            meshes: the replicas of dense and of expert parameters.
        """
        super().__init__(list(param_groups), {"lr": lr, "weight_decay": weight_decay})
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

        Communication: two all-to-alls over the data-parallel ranks per round of matrices, and
        what `MuonSettings.tp_mode` says over the tensor-parallel ranks.
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
        """Advance the momentum, and return what is to be orthogonalised, flat."""
        gradient = item.main_param.grad
        if gradient is None:
            return torch.zeros_like(item.main_param).view(-1)
        momentum = self.state[item.main_param]["momentum_buffer"]
        momentum.lerp_(gradient, 1.0 - self.settings.momentum)
        if self.settings.uses_nesterov:
            return torch.lerp(gradient, momentum, self.settings.momentum).view(-1)
        return momentum.clone().view(-1)

    def _full_update(self, parameter: nn.Parameter, direction: Tensor) -> Tensor:
        """Turn the direction of a parameter, of its shape, into its update."""
        meta = get_param_meta(parameter)
        tp = self._groups.expt_tp if meta.is_expert else self._groups.tp
        if meta.split_dim is None or tp.size() == 1:
            return self._fused_update(direction, meta, SINGLE_RANK)
        if self.settings.tp_mode != "duplicated":
            return self._fused_update(direction, meta, tp)
        parts = all_gather(direction.contiguous(), tp).chunk(tp.size())
        update = self._fused_update(unshard(parts, meta), meta, SINGLE_RANK)
        return shard_of(update, meta, tp.rank(), tp.size())

    def _fused_update(self, direction: Tensor, meta: ParamMeta, tp: Group) -> Tensor:
        """Orthogonalise each of the matrices that are stacked in one.

        Args:
            tp: the ranks that hold the other parts; of one rank for an unsharded matrix.
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
            if self.settings.tp_mode == "distributed":
                part = orthogonalize(
                    part, self.settings.num_ns_steps, split_dim=meta.split_dim, group=tp
                )
                shape = (height, num_columns)
            else:
                if part.numel():
                    part = orthogonalize(part, self.settings.num_ns_steps, group=SINGLE_RANK)
                shape = (max(1, part.shape[0]), part.shape[1])
            scale = update_scale(*shape, self.settings.scale_mode) * self.settings.extra_scale
            update[mine] = part.mul_(scale)
        return update

    def _stack(
        self, meta: ParamMeta, num_rows: int, first_row: int, num_local: int
    ) -> tuple[list[int], Tensor]:
        """Return the heights of the stacked matrices, and to which one each local row belongs."""
        rows = torch.arange(num_local)
        if not self.settings.splits_fused:
            return [num_rows], torch.zeros_like(rows)
        if meta.stride > 1 and meta.split_dim == 0:
            return [num_rows // meta.stride] * meta.stride, rows // (num_local // meta.stride)
        pattern = meta.fused_row_sizes or (num_rows,)
        ends = torch.tensor(pattern).cumsum(0)
        period = int(ends[-1])
        owners = torch.searchsorted(ends, (rows + first_row) % period, right=True)
        return [height * (num_rows // period) for height in pattern], owners
