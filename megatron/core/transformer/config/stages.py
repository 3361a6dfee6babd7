"""How layers and sequences are split over ranks: stages, context parallelism, overlapped passes."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

from megatron.core.context_parallel import CP_COMM_TYPES
from megatron.core.foundation.errors import ConfigError, MegatronError
from megatron.core.pipeline_parallel.layout import PipelineParallelLayerLayout, virtual_stages_of
from megatron.core.pipeline_parallel.schedule_definitions import schedule_named
from megatron.core.settings.flags import flag
from megatron.core.transformer.config.field_values import NOT_NEGATIVE
from megatron.core.utils import best_divisor

if TYPE_CHECKING:
    from megatron.core.transformer.transformer_config import TransformerConfig


@dataclass
class StageConfig:
    """Uneven stages. `pipeline_parallel.layout` checks them and derives the layers per stage."""

    num_layers_in_first_pipeline_stage: int | None = flag(
        None, name="decoder_first_pipeline_num_layers"
    )
    """Layers of the first stage; the others share the rest evenly."""
    num_layers_in_last_pipeline_stage: int | None = flag(
        None, name="decoder_last_pipeline_num_layers"
    )
    """Layers of the last stage."""
    account_for_embedding_in_pipeline_split: bool = False
    """Count the embedding as one layer of the first stage."""
    account_for_loss_in_pipeline_split: bool = False
    """Count the loss as one layer of the last stage."""
    pipeline_model_parallel_layout: str | list | PipelineParallelLayerLayout | None = None
    """Explicit layout, for example "Et*3|(tt|)*29,m|L". It also defines the number of chunks of
    each pipeline rank, unless virtual_pipeline_model_parallel_size does."""


def derive_virtual_stages(config: TransformerConfig) -> None:
    """Fill virtual_pipeline_model_parallel_size from the schedule or the layout."""
    size, layout = config.pipeline_model_parallel_size, config.pipeline_model_parallel_layout
    num_chunks = schedule_named(config.pipeline_schedule).num_chunks or 1
    if config.virtual_pipeline_model_parallel_size is not None:
        return
    if size > 1 and num_chunks > 1:
        config.virtual_pipeline_model_parallel_size = num_chunks
    elif layout is not None:
        config.virtual_pipeline_model_parallel_size = virtual_stages_of(layout, size)


def cp_comm_type_of_layer(config: TransformerConfig, layer_number: int) -> str | None:
    """Return how a layer, by its 1-based number, reads keys of other ranks; None on one rank."""
    kinds = config.cp_comm_type
    if config.sequence_units > 1:
        return "all_gather"  # the arithmetic of `layout_invariant_mode` is the same for all kinds
    if config.context_parallel_size == 1:
        return None
    # Layers of multi-token prediction, numbered after the last layer, follow the last layer.
    if isinstance(kinds, list):
        return kinds[min(layer_number, len(kinds)) - 1] if kinds else "p2p"
    return kinds or "p2p"


def context_parallel_problems(config: TransformerConfig) -> Iterator[MegatronError]:
    """Yield the problems of the context parallelism of a `TransformerConfig`."""
    cp, kinds = config.context_parallel_size, config.cp_comm_type
    levels = config.hierarchical_context_parallel_sizes
    if isinstance(kinds, list) and len(kinds) not in (0, config.num_layers):
        yield ConfigError(
            f"{len(kinds)} communication types for {config.num_layers} layers.",
            rule="one type holds for all layers, or each layer has its own",
            flags=["--cp-comm-type", "--num-layers"],
            fix=f"give one type, or {config.num_layers}",
        )
    used = {kinds} if isinstance(kinds, str) else set(kinds or ["p2p"])
    for kind in sorted(used - set(CP_COMM_TYPES)):
        yield ConfigError(
            f"communication type {kind!r} is unknown.",
            rule=f"known types are {', '.join(CP_COMM_TYPES)}",
            flags=["--cp-comm-type"],
            fix="use --cp-comm-type p2p",
        )
    if cp == 1:
        return
    if "a2a+p2p" in used and (levels is None or len(levels) != 2):
        yield ConfigError(
            "a2a+p2p without the sizes of its two levels.",
            rule="ranks exchange heads in the first level, and keys around a ring in the second",
            flags=["--cp-comm-type", "--hierarchical-context-parallel-sizes"],
            fix="add --hierarchical-context-parallel-sizes"
            f" {best_divisor(cp, max(1, math.isqrt(cp)))} {cp // best_divisor(cp, math.isqrt(cp))}",
        )
        return
    if levels is not None and math.prod(levels) != cp:
        yield ConfigError(
            f"hierarchical context-parallel sizes {levels} for context-parallel size {cp}.",
            rule="the product of the levels is the context-parallel size",
            flags=["--hierarchical-context-parallel-sizes", "--context-parallel-size"],
            fix=f"use --context-parallel-size {math.prod(levels)}",
        )
        return
    for kind in sorted(used & {"a2a", "a2a+p2p"}):
        ranks = cp if kind == "a2a" or levels is None else levels[0]
        heads = config.num_attention_heads // config.tensor_model_parallel_size
        if heads % ranks:
            yield ConfigError(
                f"{heads} query heads of a tensor-parallel rank cannot be exchanged between"
                f" {ranks} context-parallel ranks.",
                rule=f"with {kind} a rank attends with a whole number of query heads",
                flags=["--cp-comm-type", "--num-attention-heads", "--context-parallel-size"],
                fix="use --cp-comm-type p2p, or a size that divides"
                f" {heads}: {best_divisor(heads, ranks)}",
            )


_FLAG = "--overlap-moe-expert-parallel-comm"


def overlap_f_b_problems(config: TransformerConfig) -> Iterator[MegatronError]:
    """Yield the reasons against overlapping forwards and backwards of a `TransformerConfig`."""
    if not config.overlap_moe_expert_parallel_comm:
        return
    ranks, dispatcher = config.expert_model_parallel_size, config.moe_token_dispatcher_type
    if config.num_moe_experts is None or ranks == 1 or dispatcher == "allgather":
        yield ConfigError(
            f"overlap_moe_expert_parallel_comm with {config.num_moe_experts} experts,"
            f" expert_model_parallel_size={ranks}, moe_token_dispatcher_type={dispatcher!r}.",
            rule="it hides an all-to-all between the ranks that hold the experts",
            flags=[_FLAG, "--expert-model-parallel-size", "--moe-token-dispatcher-type"],
            fix="use --moe-token-dispatcher-type alltoall and several expert-parallel ranks,"
            f" or drop {_FLAG}",
        )
    schedule = schedule_named(config.pipeline_schedule)
    if not schedule.overlaps_f_b:
        yield schedule.overlap_error(ConfigError)
    if config.recompute_granularity == "full" or config.moe_layer_recompute:
        yield ConfigError(
            "overlap_moe_expert_parallel_comm with recomputed expert layers.",
            rule="the all-to-all of a recomputation is not hidden",
            flags=[_FLAG, "--recompute-granularity", "--moe-layer-recompute"],
            fix="use --recompute-granularity selective --recompute-modules core_attn",
        )


@dataclass
class PredictionConfig:
    """Multi-token prediction (DeepSeek-V3, section 2.2, arXiv 2412.19437)."""

    mtp_num_layers: int | None = flag(None, within=NOT_NEGATIVE)
    """Number of further tokens to predict, each by one more layer, or by the layers after / in
    --hybrid-layer-pattern. None or 0 predicts only the next token."""
    mtp_loss_scaling_factor: float = flag(0.1, part_of="mtp_num_layers", within=NOT_NEGATIVE)
    """Weight of the mean of their losses, relative to the loss of the next token."""

    mtp_use_repeated_layer: bool = flag(False, part_of="mtp_num_layers")
    """Predict all further tokens with one layer, which runs once for each."""

    @property
    def num_built_prediction_layers(self) -> int:
        """Number of built layers that predict later tokens: one if the layer is repeated."""
        depths = self.mtp_num_layers or 0
        return min(depths, 1) if self.mtp_use_repeated_layer else depths
