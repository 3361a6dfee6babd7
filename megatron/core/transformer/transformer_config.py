"""The config of a transformer: flat for callers, assembled from small groups.

Every group checks itself; all problems are raised in one error. Derived values are filled once,
on construction.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from itertools import chain
from typing import Any

import torch

from megatron.core.foundation.errors import ConfigError, MegatronError, raise_together
from megatron.core.model_parallel_config import ModelParallelConfig
from megatron.core.settings.field_types import check_types
from megatron.core.settings.inert_flags import (
    refused_settings,
    warn_of_unused_settings,
    with_inert_fields,
)
from megatron.core.transformer.config.activation_offload import (
    DROPPED_BY,
    ActivationOffloadConfig,
    activation_offload_problems,
)
from megatron.core.transformer.config.attention import (
    LatentAttentionConfig,
    PositionConfig,
    QueryKeyClipConfig,
    SparseAttentionConfig,
    latent_attention_problems,
    query_key_clip_problems,
    sparse_attention_problems,
)
from megatron.core.transformer.config.block import BlockConfig, block_problems
from megatron.core.transformer.config.combinations import combination_problems, split_problems
from megatron.core.transformer.config.experts import ExpertConfig, derive_experts, expert_problems
from megatron.core.transformer.config.layer_kinds import LayerKind
from megatron.core.transformer.config.linear_attention import (
    LinearAttentionConfig,
    derive_mixers,
    linear_attention_problems,
)
from megatron.core.transformer.config.precision import (
    GraphConfig,
    PrecisionConfig,
    RecomputeConfig,
    derive_recompute,
    graph_problems,
    precision_problems,
    recompute_problems,
)
from megatron.core.transformer.config.shape import (
    InitializationConfig,
    MaximalUpdateConfig,
    ShapeConfig,
    derive_initialization,
    derive_maximal_update,
    derive_shape,
    maximal_update_problems,
    shape_problems,
)
from megatron.core.transformer.config.stages import (
    PredictionConfig,
    StageConfig,
    context_parallel_problems,
    derive_virtual_stages,
    overlap_f_b_problems,
    prediction_problems,
)

_DERIVATIONS: tuple[Callable[[Any], None], ...] = (
    derive_virtual_stages,
    derive_shape,
    derive_maximal_update,
    derive_initialization,
    derive_recompute,
    derive_mixers,
    derive_experts,
)
_CHECKS: tuple[Callable[[Any], Iterable[MegatronError]], ...] = (
    shape_problems,
    block_problems,
    latent_attention_problems,
    linear_attention_problems,
    query_key_clip_problems,
    maximal_update_problems,
    prediction_problems,
    precision_problems,
    combination_problems,
    recompute_problems,
    activation_offload_problems,
    expert_problems,
    overlap_f_b_problems,
    graph_problems,
)


@dataclass
@with_inert_fields("transformer")
class TransformerConfig(
    StageConfig,
    RecomputeConfig,
    ActivationOffloadConfig,
    PrecisionConfig,
    InitializationConfig,
    PositionConfig,
    LatentAttentionConfig,
    LinearAttentionConfig,
    SparseAttentionConfig,
    QueryKeyClipConfig,
    MaximalUpdateConfig,
    PredictionConfig,
    ExpertConfig,
    GraphConfig,
    BlockConfig,
    ShapeConfig,
    ModelParallelConfig,
):
    """All settings of layers. Names and defaults are Megatron's."""

    def __post_init__(self) -> None:
        """Derive what follows from other fields, then raise all problems together."""
        check_types(self)
        self._derive_layers()
        self._derive_parallel()
        if self.fp32_residual_connection and self.pipeline_dtype is None:
            self.pipeline_dtype = torch.float32  # stages send the residual stream
        for derive in _DERIVATIONS:
            derive(self)
        problems = [*self.check_parallel(), *refused_settings(self)]
        problems += chain.from_iterable(check(self) for check in _CHECKS)
        if not problems:  # these compute with the sizes
            kinds = chain(self.layer_kinds(), *self.prediction_kinds())
            checks = [split_problems, context_parallel_problems]
            checks += [sparse_attention_problems] if any(kind.is_sparse for kind in kinds) else []
            problems += chain.from_iterable(check(self) for check in checks)
        raise_together(problems, summary=type(self).__name__)
        warn_of_unused_settings(self)

    def offloads(self, module: str) -> bool:
        """Return whether the saved activations of this part of a layer are kept in host memory."""
        is_dropped = any(map(self.recomputes, DROPPED_BY.get(module, ())))
        return module in self.modules_to_offload and not is_dropped

    @property
    def num_offloaded_layers(self) -> int:
        """Number of layers at the start of a chunk with all saved activations in host memory."""
        return 0 if self.overlap_moe_expert_parallel_comm else self.cpu_offloading_num_layers

    def _derive_layers(self) -> None:
        """Derive number, experts and stages of the layers from the letters of the layers."""
        try:
            pattern = self.pattern
        except ConfigError:
            return  # check_linear_attention reports it
        if pattern is None:
            return
        self.num_layers = self.num_layers or len(pattern.layers)
        self.moe_layer_freq = pattern.layers_with_experts
        self.mtp_num_layers = self.mtp_num_layers or len(pattern.later) or None
        self.pipeline_model_parallel_layout = (
            self.pipeline_model_parallel_layout or pattern.pipeline_layout
        )

    @property
    def sends_both_stacks(self) -> bool:
        """Whether messages between stages contain the tokens of an encoder and of a decoder."""
        return self.encoder_num_layers is not None

    def layer_kinds(self) -> tuple[LayerKind, ...]:
        """Return the kind of each layer of the model."""
        return self.kinds_of_layers(self.layers_with_experts(self.num_layers))

    def layer_kind(self, layer_number: int) -> LayerKind:
        """Return the kind of a layer, by its 1-based number in the whole model; the layers of
        `prediction_kinds` have the numbers after the last one."""
        kinds = (*self.layer_kinds(), *chain.from_iterable(self.prediction_kinds()))
        return kinds[min(layer_number, len(kinds)) - 1]

    def prediction_kinds(self) -> tuple[tuple[LayerKind, ...], ...]:
        """Return the kinds of the layers of each depth of multi-token prediction."""
        depths = range(1, self.num_built_prediction_layers + 1)
        if self.pattern is None:
            return (self.layer_kinds()[-1:],) * len(depths)
        return tuple(self.pattern.kinds_of_depth(depth) for depth in depths)


@dataclass
class MLATransformerConfig(TransformerConfig):
    """The config of a model with multi-latent attention, with Megatron's defaults for one."""

    multi_latent_attention: bool = True
    q_lora_rank: int | None = 512
    normalization: str = "RMSNorm"
    max_position_embeddings: int | None = None
    """Another name of `original_max_position_embeddings`, which Megatron had first."""

    def __post_init__(self) -> None:
        """Read the other name, then derive and check as `TransformerConfig` does."""
        if self.max_position_embeddings is not None:
            self.original_max_position_embeddings = self.max_position_embeddings
        super().__post_init__()
