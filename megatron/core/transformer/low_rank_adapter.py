"""Low-rank adapters on parallel linear layers: the layer is frozen, a product of rank r is learned.

E. Hu et al., "LoRA: Low-Rank Adaptation of Large Language Models", section 4.1, arXiv 2106.09685:
y = W x + (alpha / r) B A dropout(x), with A drawn at random and B zero, so training begins at the
frozen model.

Tensor parallelism follows the layer's own. Of a column-parallel layer A is replicated and B has
the rows of W; of a row-parallel one A has the columns of W and B is replicated; of a replicated
layer, as latent attention has, both are. What is communicated is r wide: the projection of the
sequence shards is gathered, partial projections are summed. Names, initial values and dropout do
not depend on the layout. Of a mixture of experts the routed ones stay as they are.

Legend: s sequence, b micro batch, i and o inputs and outputs of the layer, r rank.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from enum import Enum
from typing import Any

import torch.nn.functional as F
from torch import Tensor, nn

from megatron.core.context_parallel import sequence_shard_of_rank
from megatron.core.foundation.errors import ConfigError
from megatron.core.parameters.initialization import canonical_names, draw_parameter
from megatron.core.parameters.keyed_draws import keyed_dropout, keyed_keep_mask
from megatron.core.parameters.param_meta import ParamMeta, get_param_meta, set_param_meta
from megatron.core.parameters.rng import SequenceShard, rng_state
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.settings.flags import flag
from megatron.core.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear
from megatron.core.tensor_parallel.mappings import (
    copy_to_tensor_model_parallel_region,
    gather_from_sequence_parallel_region,
    reduce_from_tensor_model_parallel_region,
    reduce_scatter_to_sequence_parallel_region,
)
from megatron.core.topology.group import SINGLE_RANK
from megatron.core.transformer.replicated_linear import ReplicatedLinear

TARGETS = (
    "linear_qkv", "linear_q_proj", "linear_q_down_proj", "linear_q_up_proj",
    "linear_kv_down_proj", "linear_kv_up_proj", "linear_proj", "linear_fc1", "linear_fc2",
)  # fmt: skip
"""Layers that can have an adapter; a model has either linear_qkv or those of latent attention."""
ATTRIBUTE = "adapter"
"""Name of an adapter in its layer; parameters are `<layer>.adapter.down` and `.up`."""


class WeightSplit(Enum):
    """How the weight of a layer is split over tensor-parallel ranks."""

    COLUMN = "rows of W"
    ROW = "columns of W"
    REPLICATED = "not split"


class UniformInit:
    """Fill with U(-bound, bound). Elementwise, so any block of rows can be drawn alone."""

    is_elementwise = True

    def __init__(self, bound: float) -> None:
        self.bound = bound

    def __call__(self, tensor: Tensor) -> Tensor:
        return nn.init.uniform_(tensor, -self.bound, self.bound)


@dataclass(frozen=True, kw_only=True)
class LoraConfig:
    """Settings of the adapters of a run, which its checkpoints name, too."""

    lora_rank: int | None = None
    """Train adapters of this rank beside the layers of a frozen model, which --load-hf or
    --pretrained-checkpoint gives. Checkpoints hold the adapters alone."""
    lora_alpha: float | None = flag(None, part_of="lora_rank")
    """Their product is scaled by lora-alpha / lora-rank. Default lora-rank."""
    lora_dropout: float = flag(0.0, part_of="lora_rank")
    """Dropout of an adapter's input."""
    lora_target_modules: list[str] = flag(
        list(TARGETS), nargs="+", choices=TARGETS, part_of="lora_rank"
    )
    """Layers that get one; all of them means those that the model has."""


@dataclass(frozen=True, kw_only=True)
class AdapterSettings:
    """Rank, strength and places of the adapters of a model."""

    rank: int
    alpha: float
    """The product is scaled by alpha / rank."""
    dropout: float = 0.0
    """Of the adapter's input, in training."""
    target_modules: tuple[str, ...] = TARGETS

    @property
    def scale(self) -> float:
        """Factor on the product."""
        return self.alpha / self.rank


class LowRankAdapter(nn.Module):
    """The learned product beside one parallel linear layer.

    Attributes:
        down: A, [r, i] ([r, i/tp] beside a row-parallel layer).
        up: B, [o/tp, r] ([o, r] beside a row-parallel or replicated layer).
    """

    def __init__(
        self,
        layer: ColumnParallelLinear | RowParallelLinear | ReplicatedLinear,
        settings: AdapterSettings,
        name: str,
        groups: ProcessGroupCollection,
    ) -> None:
        super().__init__()
        self.settings, self.name, self.groups = settings, name, groups
        weight = layer.weight
        assert weight is not None
        self.tp = layer.tp_group
        if isinstance(layer, ReplicatedLinear):
            self.split, self.input_size = WeightSplit.REPLICATED, weight.shape[1]
            self.sequence_parallel = bool(get_param_meta(weight).partial_grad_axes)
        else:
            is_column = isinstance(layer, ColumnParallelLinear)
            self.split = WeightSplit.COLUMN if is_column else WeightSplit.ROW
            self.input_size, self.sequence_parallel = layer.input_size, layer.sequence_parallel
        self.down = nn.Parameter(weight.new_empty(settings.rank, weight.shape[1]))
        self.up = nn.Parameter(weight.new_zeros(weight.shape[0], settings.rank))
        meta = get_param_meta(weight)
        # Drawn as torch draws a linear layer's weight: U(-1/sqrt(i), 1/sqrt(i)).
        draw = UniformInit(1.0 / math.sqrt(self.input_size))
        # The replicated one sees this rank's part of the sequence, under sequence parallelism.
        partial_axes: tuple[str, ...] = ("tp",) if self.sequence_parallel else ()
        down = ParamMeta(init_method=draw, partial_grad_axes=partial_axes)
        up = ParamMeta(partial_grad_axes=partial_axes)
        if self.split is WeightSplit.COLUMN:
            up = ParamMeta(split_dim=0, split_axis="tp", stride=meta.stride)
        elif self.split is WeightSplit.ROW:
            down = ParamMeta(split_dim=1, split_axis="tp", init_method=draw)
        set_param_meta(self.down, down)
        set_param_meta(self.up, up)

    def forward(self, x: Tensor) -> Tensor:
        """Return what is added to the layer's output, in its shape.

        Args:
            x: the layer's input.
        Communication:
            of [s, b, r]: an all-gather of rows or a copy (column), a reduce-scatter or an
            all-reduce (row), none (replicated); in backward their conjugates.
        """
        narrow = F.linear(self._dropped(x), self.down) * self.settings.scale
        if self.split is WeightSplit.REPLICATED:
            return F.linear(narrow, self.up)
        if self.split is WeightSplit.COLUMN:
            enter = (
                gather_from_sequence_parallel_region
                if self.sequence_parallel
                else copy_to_tensor_model_parallel_region
            )
            return F.linear(enter(narrow, group=self.tp), self.up)
        leave = (
            reduce_scatter_to_sequence_parallel_region
            if self.sequence_parallel
            else reduce_from_tensor_model_parallel_region
        )
        return F.linear(leave(narrow, group=self.tp), self.up)

    def _dropped(self, x: Tensor) -> Tensor:
        """Drop inputs; a place of its own for the draws leaves those of the model as they are."""
        probability = self.settings.dropout
        if not (self.training and probability):
            return x
        state = rng_state()
        with state.in_scope(*state.scope.path, ATTRIBUTE, self.name, rows=self._rows(x.shape[0])):
            if self.split is not WeightSplit.ROW:
                return keyed_dropout(x, probability)
            # The inputs of all ranks are drawn, of which these are some columns.
            full = x.new_empty(1).expand(*x.shape[:-1], self.input_size)
            begin = self.tp.rank() * x.shape[-1]
            mask = keyed_keep_mask(full, 1.0 - probability)[..., begin : begin + x.shape[-1]]
            return x * mask.div_(1.0 - probability)

    def _rows(self, num_rows: int) -> SequenceShard:
        """Return which positions the input holds."""
        holds_shard = self.split is not WeightSplit.ROW and self.sequence_parallel
        run = rng_state().scope.run
        if run is None:
            sp = self.tp if holds_shard else SINGLE_RANK
            return sequence_shard_of_rank(num_rows, cp=self.groups.cp, sp=sp)
        first, last, num_rows = run
        if not self.sequence_parallel:
            return sequence_shard_of_rank(num_rows, cp=self.groups.cp, sp=SINGLE_RANK).run(
                first, last
            )
        # Where a run is gathered it is the same run of every rank's shard.
        size = self.tp.size()
        full = sequence_shard_of_rank(num_rows * size, cp=self.groups.cp, sp=SINGLE_RANK)
        shards = [self.tp.rank()] if holds_shard else range(size)
        runs = [full.shard(rank, size).run(first, last) for rank in shards]
        return SequenceShard(tuple(pair for part in runs for pair in part.ranges), full.total)


def _add_adapter_output(layer: Any, arguments: tuple[Tensor, ...], output: Any) -> Any:
    """Forward hook of a layer with an adapter."""
    out, bias = output
    return out + layer.adapter(arguments[0]), bias


def add_adapters(
    model: nn.Module, settings: AdapterSettings, groups: ProcessGroupCollection
) -> int:
    """Freeze a model and give its layers adapters, which alone are trained from then on.

    Args:
        model: this rank's chunk, before any wrapper of data parallelism.
    Returns:
        the number of trained parameters on this rank.
    Raises:
        ConfigError: a layer that was asked for is not there, or cannot have one.
    """
    for parameter in model.parameters():
        parameter.requires_grad_(False)
    present = set()
    for path, layer in list(model.named_modules()):
        name = path.rpartition(".")[2]
        if not isinstance(layer, (ColumnParallelLinear, RowParallelLinear, ReplicatedLinear)):
            continue
        if getattr(layer, "is_expert", False):
            continue  # frozen, as all routed experts are where products are grouped
        present.add(name)
        if name in settings.target_modules:
            layer.add_module(ATTRIBUTE, LowRankAdapter(layer, settings, name, groups))
            layer.register_forward_hook(_add_adapter_output)
    wanted = set(settings.target_modules)
    missing = sorted(wanted - present)
    # A stage may hold no layers at all, and all names are never in one model.
    if missing and wanted != set(TARGETS) and present & set(TARGETS):
        raise ConfigError(
            f"the model has no layer called {', '.join(missing)}.",
            rule=f"adapters are added to the layers {', '.join(TARGETS)} of the local backend",
            flags=["--lora-target-modules", "--transformer-impl"],
            fix="name layers that the model has, with --transformer-impl local",
        )
    names = canonical_names(model)
    tp_rank, tp_size = groups.tp.rank(), groups.tp.size()
    trained = 0
    for name, parameter in adapter_parameters(model):
        trained += parameter.numel()
        meta = get_param_meta(parameter)
        if meta.init_method is not None:
            draw_parameter(
                parameter,
                meta,
                meta.init_method,
                seed=rng_state().seed,
                name=names[name],
                axis_rank=tp_rank,
                axis_size=tp_size,
            )
    return trained


def adapter_parameters(model: nn.Module) -> Iterable[tuple[str, nn.Parameter]]:
    """Yield the parameters of all adapters by their names in `model`."""
    for name, parameter in model.named_parameters():
        if is_of_adapter(name):
            yield name, parameter


def is_of_adapter(name: str) -> bool:
    """Return whether a parameter's name is that of an adapter's."""
    return name.endswith((f".{ATTRIBUTE}.down", f".{ATTRIBUTE}.up"))
