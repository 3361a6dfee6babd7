"""Low-rank adapters on parallel linear layers: the layer is frozen, a product of rank r is trained.

E. Hu et al., "LoRA: Low-Rank Adaptation of Large Language Models", section 4.1, arXiv 2106.09685:
y = W x + (alpha / r) B A dropout(x), with A drawn at random and B zero, so training begins at the
frozen model.

With `use_dora` a vector m of magnitudes is trained, too (S. Liu et al., "DoRA: Weight-Decomposed
Low-Rank Adaptation", arXiv 2402.09353), for W' = W + (alpha / r) B A:
y = m / |W'| * (W x + (alpha / r) B A dropout(x)), where |W'| are the norms of the rows of W', one
for each output. No gradient flows through the norms (section 4.3). m is initialised to |W|.

The adapter is split like its layer. Column-parallel: A is replicated and B is split like the rows
of W. Row-parallel: A is split like the columns of W and B is replicated. Replicated (in latent
attention): both are replicated. Communication is r wide: the projection of the sequence shards is
gathered, partial projections are summed. Each routed expert has its own A and B; its token
dispatcher communicates, so the adapter does not. Names, initial values and dropout do not depend on
the layout.

Legend: s sequence, b micro batch, i and o inputs and outputs of the layer, r rank; n tokens,
ordered by expert.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from megatron.core.context_parallel import sequence_shard_of_rank
from megatron.core.parameters.keyed_draws import keyed_dropout, keyed_keep_mask
from megatron.core.parameters.param_meta import ParamMeta, get_param_meta, set_param_meta
from megatron.core.parameters.rng import rng_state
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.settings.field_types import check_types
from megatron.core.settings.flags import flag
from megatron.core.step_context.random_scope import SequenceShard
from megatron.core.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear
from megatron.core.tensor_parallel.mappings import (
    copy_to_tensor_model_parallel_region,
    gather_from_sequence_parallel_region,
    reduce_from_tensor_model_parallel_region,
    reduce_scatter_to_sequence_parallel_region,
)
from megatron.core.topology.group import SINGLE_RANK
from megatron.core.transformer.config.block import DRAWN_BY_PLACE
from megatron.core.transformer.moe.grouped_linear import GroupedLinear, grouped_linear
from megatron.core.transformer.replicated_linear import ReplicatedLinear

TARGETS = (
    "linear_qkv", "linear_q_proj", "linear_q_down_proj", "linear_q_up_proj",
    "linear_kv_down_proj", "linear_kv_up_proj", "linear_proj", "linear_fc1", "linear_fc2",
    "in_proj", "out_proj",
)  # fmt: skip
"""Layers that get an adapter by default, if the model has them: of attention, latent attention,
dense MLPs and shared experts, and in_proj and out_proj of recurrent mixers."""
EXPERT_TARGETS = ("experts.linear_fc1", "experts.linear_fc2")
"""Layers of routed experts, which get an adapter only if they are named."""
ATTRIBUTE = "adapter"
"""Name of an adapter in its layer; parameters are `<layer>.adapter.down`, `.up` and, of DoRA,
`.magnitude`, numbered by expert (`.down0`) where the products of experts are grouped."""
_PARAMETER = re.compile(rf"(?:.*\.)?{ATTRIBUTE}\.(?:down|up|magnitude)\d*")


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
    """Settings of the adapters of a run, which its checkpoints also store."""

    lora_rank: int | None = None
    """Train adapters of this rank on the layers of a frozen model, which --load-hf or
    --pretrained-checkpoint loads. Checkpoints contain the adapters only."""
    lora_alpha: float | None = flag(None, part_of="lora_rank")
    """The product is scaled by lora-alpha / lora-rank. Default lora-rank."""
    lora_dropout: float = flag(0.0, part_of="lora_rank", per_micro_batch=DRAWN_BY_PLACE)
    """Dropout of an adapter's input."""
    lora_target_modules: list[str] = flag(
        list(TARGETS), nargs="+", choices=(*TARGETS, *EXPERT_TARGETS), part_of="lora_rank"
    )
    """Layers that get an adapter; of the default, the layers that the model has. Routed experts get
    one each if experts.linear_fc1 or experts.linear_fc2 is named."""
    use_dora: bool = flag(False, part_of="lora_rank")
    """Also train the norm of each row of the adapted weights (DoRA, arXiv 2402.09353)."""

    def __post_init__(self) -> None:
        check_types(self)

    @property
    def rank(self) -> int:
        """Rank of the trained products."""
        assert self.lora_rank, "a run without adapters"
        return self.lora_rank

    @property
    def scale(self) -> float:
        """Factor on the product."""
        return (self.lora_alpha or self.rank) / self.rank


class LowRankAdapter(nn.Module):
    """The trained product of one parallel linear layer.

    Attributes:
        down: A, [r, i] ([r, i/tp] for a row-parallel layer).
        up: B, [o/tp, r] ([o, r] for a row-parallel or replicated layer).
        magnitude: with DoRA m, [o/tp] or [o] like the rows of B; else None. It is zero until
            `set_magnitudes` reads the frozen weights.
    """

    def __init__(
        self,
        layer: ColumnParallelLinear | RowParallelLinear | ReplicatedLinear,
        settings: LoraConfig,
        name: str,
        groups: ProcessGroupCollection,
    ) -> None:
        super().__init__()
        self.settings, self.name, self.groups = settings, name, groups
        weight = layer.weight
        assert weight is not None
        self.is_expert, self.tp = layer.is_expert, layer.tp_group
        if isinstance(layer, ReplicatedLinear):
            self.split, self.input_size = WeightSplit.REPLICATED, weight.shape[1]
            self.sequence_parallel = bool(get_param_meta(weight).partial_grad_axes)
        else:
            is_column = isinstance(layer, ColumnParallelLinear)
            self.split = WeightSplit.COLUMN if is_column else WeightSplit.ROW
            self.input_size, self.sequence_parallel = layer.input_size, layer.sequence_parallel
        self.down = nn.Parameter(weight.new_empty(settings.rank, weight.shape[1]))
        self.up = nn.Parameter(weight.new_zeros(weight.shape[0], settings.rank))
        # The gradient of a replicated factor is a partial sum: over this rank's tokens under
        # sequence parallelism, and over this rank's part of the product inside an expert.
        is_partial = self.tp.size() > 1 if self.is_expert else self.sequence_parallel
        down, up = _factor_metas(get_param_meta(weight), self.input_size, is_partial=is_partial)
        set_param_meta(self.down, down)
        set_param_meta(self.up, up)
        self.register_parameter("magnitude", None)
        if settings.use_dora:
            self.magnitude = nn.Parameter(weight.new_zeros(weight.shape[0]))
            set_param_meta(self.magnitude, up)

    def forward(self, x: Tensor) -> Tensor:
        """Return (alpha / r) B A x, of the shape of the layer's output.

        Args:
            x: the layer's input.
        Communication:
            of [s, b, r]: an all-gather or a copy (column), a reduce-scatter or an all-reduce (row),
            none (replicated, or in a routed expert); in backward their conjugates.
        """
        narrow = F.linear(self._dropped(x), self.down) * self.settings.scale
        if self.split is WeightSplit.REPLICATED or self.is_expert:
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

    def adapted(self, x: Tensor, out: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        """Return the output of the layer with its adapter.

        Args:
            x: the layer's input; out: its output.
            weight: its weight [o/tp, i], or [o, i/tp]; bias: the bias that `out` includes, if any.
        Communication:
            as in `forward`; with magnitudes an all-reduce of [o] for a row-parallel layer.
        """
        added = self(x)
        if self.magnitude is None:
            return out + added
        gain = self.magnitude / self.row_norms(weight, self.up, self.down)
        linear = out if bias is None else out - bias
        return out + (gain - 1.0) * linear + gain * added

    @torch.no_grad()
    def row_norms(
        self, weight: Tensor, up: Tensor | None = None, down: Tensor | None = None
    ) -> Tensor:
        """Return the norm of each row of W, or of W + (alpha / r) B A: [o/tp], or [o].

        Communication: an all-reduce of [o] for a row-parallel layer.
        """
        # Accumulated in fp32: a bf16 sum loses the small squares of a long row.
        dtype = torch.promote_types(weight.dtype, torch.float32)
        rows = weight.to(dtype)
        if up is not None and down is not None:
            rows = torch.addmm(rows, up.to(dtype), down.to(dtype), alpha=self.settings.scale)
        if self.split is not WeightSplit.ROW or self.tp.size() == 1:
            return torch.linalg.vector_norm(rows, dim=1).to(weight.dtype)
        squares = reduce_from_tensor_model_parallel_region(rows.square().sum(1), group=self.tp)
        return squares.sqrt().to(weight.dtype)

    def _dropped(self, x: Tensor) -> Tensor:
        """Apply dropout, in a scope of its own: the model's draws do not change."""
        probability = self.settings.lora_dropout
        if not (self.training and probability):
            return x
        state = rng_state()
        with state.in_scope(*state.scope.path, ATTRIBUTE, self.name, rows=self._rows(x.shape[0])):
            if self.split is not WeightSplit.ROW:
                return keyed_dropout(x, probability)
            # The mask of all ranks' columns is drawn; this rank uses its own columns.
            full = x.new_empty(1).expand(*x.shape[:-1], self.input_size)
            begin = self.tp.rank() * x.shape[-1]
            mask = keyed_keep_mask(full, 1.0 - probability)[..., begin : begin + x.shape[-1]]
            return x * mask.div_(1.0 - probability)

    def _rows(self, num_tokens: int) -> SequenceShard:
        """Return the positions of the input's tokens."""
        holds_shard = self.split is not WeightSplit.ROW and self.sequence_parallel
        cp, token_range = self.groups.microbatch_cp, rng_state().scope.token_range
        if token_range is None:
            sp = self.tp if holds_shard else SINGLE_RANK
            return sequence_shard_of_rank(num_tokens, cp=cp, sp=sp)
        first, last, num_tokens = token_range
        if not self.sequence_parallel:
            return sequence_shard_of_rank(num_tokens, cp=cp, sp=SINGLE_RANK).run(first, last)
        # A gathered input holds the same range of every rank's shard.
        size = self.tp.size()
        full = sequence_shard_of_rank(num_tokens * size, cp=cp, sp=SINGLE_RANK)
        shards = [self.tp.rank()] if holds_shard else range(size)
        runs = [full.shard(rank, size).run(first, last) for rank in shards]
        return SequenceShard(tuple(pair for part in runs for pair in part.ranges), full.total)


class GroupedLowRankAdapter(nn.Module):
    """The trained products of the grouped linear maps of routed experts, in two grouped products.

    Attributes:
        down0, down1, ...: A of each local expert, [r, i] ([r, i/tp] if the inputs are split over
            the expert-tensor-parallel ranks).
        up0, up1, ...: B, [o/tp, r] ([o, r] if the inputs are split).
    """

    def __init__(self, layer: GroupedLinear, settings: LoraConfig) -> None:
        super().__init__()
        self.settings, self.num_gemms = settings, layer.num_gemms
        self.fuses_main_grad = layer.config.gradient_accumulation_fusion
        for index, weight in enumerate(layer.weights()):
            meta = get_param_meta(weight)
            input_size = weight.shape[1] * (layer.tp_size if meta.split_dim == 1 else 1)
            down, up = _factor_metas(meta, input_size, is_partial=layer.tp_size > 1)
            factors = (
                ("down", weight.new_empty(settings.rank, weight.shape[1]), down),
                ("up", weight.new_zeros(weight.shape[0], settings.rank), up),
            )
            for kind, values, meta in factors:
                parameter = nn.Parameter(values)
                set_param_meta(parameter, meta)
                self.register_parameter(f"{kind}{index}", parameter)

    def forward(self, x: Tensor, tokens_per_expert: Sequence[int]) -> Tensor:
        """Return (alpha / r) B A x of each expert's rows: [n, i] -> [n, o].

        No communication: with split factors each rank has a part of the sum, as in the layer.
        """
        down, up = (
            [self.get_parameter(f"{kind}{index}") for index in range(self.num_gemms)]
            for kind in ("down", "up")
        )
        narrow = grouped_linear(x, tokens_per_expert, down, self.fuses_main_grad)
        narrow = narrow * self.settings.scale
        return grouped_linear(narrow, tokens_per_expert, up, self.fuses_main_grad)


def _factor_metas(
    weight: ParamMeta, input_size: int, *, is_partial: bool
) -> tuple[ParamMeta, ParamMeta]:
    """Return the metadata of A and of B for a weight.

    Args:
        is_partial: the gradient of a replicated factor is a partial sum on each rank.
    """
    # Drawn as torch draws a linear layer's weight: U(-1/sqrt(i), 1/sqrt(i)).
    draw = UniformInit(1.0 / math.sqrt(input_size))
    axis = "expt_tp" if weight.is_expert else "tp"
    axes: tuple[str, ...] = (axis,) if is_partial else ()
    down = ParamMeta(init_method=draw, partial_grad_axes=axes, is_expert=weight.is_expert)
    up = ParamMeta(partial_grad_axes=axes, is_expert=weight.is_expert)
    if weight.split_dim == 0:
        up = ParamMeta(
            split_dim=0, split_axis=axis, stride=weight.stride, is_expert=weight.is_expert
        )
    elif weight.split_dim == 1:
        down = ParamMeta(split_dim=1, split_axis=axis, init_method=draw, is_expert=weight.is_expert)
    return down, up


def magnitude_adapters(model: nn.Module) -> Iterable[tuple[Any, LowRankAdapter]]:
    """Yield (layer, its adapter) of layers with trained magnitudes."""
    for layer in model.modules():
        adapter = getattr(layer, ATTRIBUTE, None)
        if isinstance(adapter, LowRankAdapter) and adapter.magnitude is not None:
            yield layer, adapter


def adapter_parameters(model: nn.Module) -> Iterable[tuple[str, nn.Parameter]]:
    """Yield the parameters of all adapters by their names in `model`."""
    for name, parameter in model.named_parameters():
        if is_of_adapter(name):
            yield name, parameter


def is_of_adapter(name: str) -> bool:
    """Return whether a name belongs to a parameter of an adapter."""
    return _PARAMETER.fullmatch(name) is not None
