"""Random global states and random ways to shard them."""

import random
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from megatron.core.dist_checkpointing import ShardedTensor, sharded_tensor_for_parameter
from megatron.core.dist_checkpointing.parameter_shards import make_sharded_optimizer_tensor
from megatron.core.parameters.param_meta import ParamMeta, shard_of


@dataclass(frozen=True)
class Layout:
    """Sizes of the axes of a fake run, and whether optimizer state is cut in flat ranges."""

    tp: int = 1
    pp: int = 1
    dp: int = 1
    is_zero: bool = False

    @property
    def size(self) -> int:
        return self.tp * self.pp * self.dp

    def place(self, rank: int) -> tuple[int, int, int]:
        """(tp, dp, pp) rank."""
        return rank % self.tp, rank // self.tp % self.dp, rank // self.tp // self.dp


NUM_LAYERS = 4
METAS = {
    "linear_qkv.weight": ((24, 8), ParamMeta(split_dim=0, split_axis="tp")),
    "linear_proj.weight": ((8, 16), ParamMeta(split_dim=1, split_axis="tp")),
    "linear_fc1.weight": ((32, 8), ParamMeta(split_dim=0, split_axis="tp", stride=2)),
    "linear_fc1.bias": ((32,), ParamMeta(split_dim=0, split_axis="tp", stride=2)),
    "norm.weight": ((8,), ParamMeta()),
}
EMBEDDING = ((24, 8), ParamMeta(split_dim=0, split_axis="tp", is_embedding_or_output=True))


def global_state(seed: int) -> dict[str, Tensor]:
    """Return random full tensors under global names; layers are stacked on axis 0."""
    generator = torch.Generator().manual_seed(seed)
    state = {
        f"decoder.layers.{name}": torch.randn((NUM_LAYERS, *shape), generator=generator)
        for name, (shape, _) in METAS.items()
    }
    state["embedding.weight"] = torch.randn(EMBEDDING[0], generator=generator)
    return state | {
        f"optimizer.state.exp_avg.{k}": torch.randn(v.shape, generator=generator)
        for k, v in list(state.items())
    }


def declare(full: dict[str, Tensor] | None, layout: Layout, rank: int) -> dict[str, Any]:
    """Declare one rank's share of the state; without `full`, zeros to be loaded into."""
    tp, dp, pp = layout.place(rank)
    per_stage = NUM_LAYERS // layout.pp
    declared: dict[str, Any] = {}

    def local(key: str, shape: tuple[int, ...], meta: ParamMeta, layer: int | None) -> Tensor:
        if full is None:
            whole = torch.zeros(shape)
        else:
            whole = full[key] if layer is None else full[key][layer]
        return shard_of(whole, meta, tp, layout.tp).clone()

    def add(key: str, shape: tuple[int, ...], meta: ParamMeta, layer: int | None) -> None:
        offsets = [] if layer is None else [(0, layer, NUM_LAYERS)]
        model = sharded_tensor_for_parameter(
            key,
            local(key, shape, meta, layer),
            meta,
            tp_rank=tp,
            tp_size=layout.tp,
            dp_replica=dp,
            prepend_offsets=offsets,
            allow_shape_mismatch=meta.is_embedding_or_output,
        )
        name = key if layer is None else f"{key}.{layer}"
        declared[name] = model
        moment = local(f"optimizer.state.exp_avg.{key}", shape, meta, layer)
        if layout.is_zero:
            cut = random.Random(f"{key}{layer}").randint(0, moment.numel())
            bounds = [0, cut, *[moment.numel()] * (layout.dp - 1)]
            window = slice(bounds[dp], bounds[dp + 1])
            declared[f"exp_avg.{name}"] = make_sharded_optimizer_tensor(
                model,
                moment.reshape(-1)[window].clone(),
                "optimizer.state.exp_avg",
                flattened_range=window,
                replica_id=(0, 0 if meta.split_dim is not None else tp, 0),
            )
        else:
            declared[f"exp_avg.{name}"] = make_sharded_optimizer_tensor(
                model, moment, "optimizer.state.exp_avg"
            )

    for layer in range(pp * per_stage, (pp + 1) * per_stage):
        for name, (shape, meta) in METAS.items():
            add(f"decoder.layers.{name}", shape, meta, layer)
    if pp == 0:
        add("embedding.weight", *EMBEDDING, None)
    return declared


def values(declared: dict[str, Any]) -> dict[str, Tensor]:
    """Return the tensors of declarations by name."""
    return {name: leaf.data for name, leaf in declared.items()}


def one_tensor(key: str = "w", data: Tensor | None = None, **options: Any) -> ShardedTensor:
    """Declare a full tensor held by one rank."""
    data = torch.arange(12.0).view(3, 4) if data is None else data
    return ShardedTensor.from_rank_offsets(key, data, **options)
