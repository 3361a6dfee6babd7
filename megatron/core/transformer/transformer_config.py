"""The config of a transformer: flat for callers, assembled from small groups.

Every group checks itself; all problems are raised in one error. Derived values are filled once,
on construction.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import chain

import torch

from megatron.core.foundation.errors import ConfigError, MegatronError, raise_together
from megatron.core.model_parallel_config import ModelParallelConfig
from megatron.core.settings.field_types import check_types
from megatron.core.settings.inert_flags import (
    refused_settings,
    warn_of_unused_settings,
    with_inert_fields,
)
from megatron.core.transformer.config.activation_offload import DROPPED_BY, ActivationOffloadConfig
from megatron.core.transformer.config.block import BlockConfig
from megatron.core.transformer.config.captured_graphs import GraphConfig
from megatron.core.transformer.config.context_parallel import context_parallel_problems
from megatron.core.transformer.config.experts import ExpertConfig
from megatron.core.transformer.config.initialization import InitializationConfig
from megatron.core.transformer.config.latent_attention import LatentAttentionConfig
from megatron.core.transformer.config.layer_kinds import LayerKind
from megatron.core.transformer.config.linear_attention import LinearAttentionConfig
from megatron.core.transformer.config.maximal_update import MaximalUpdateConfig
from megatron.core.transformer.config.overlap_f_b import overlap_f_b_problems
from megatron.core.transformer.config.position import PositionConfig
from megatron.core.transformer.config.precision import PrecisionConfig
from megatron.core.transformer.config.prediction import PredictionConfig
from megatron.core.transformer.config.query_key_clip import QueryKeyClipConfig
from megatron.core.transformer.config.recompute import RecomputeConfig
from megatron.core.transformer.config.shape import ShapeConfig
from megatron.core.transformer.config.sparse_attention import SparseAttentionConfig
from megatron.core.transformer.config.stages import StageConfig
from megatron.core.utils import best_divisor


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
    """Everything that layers need to know. Names and defaults are Megatron's."""

    def __post_init__(self) -> None:
        """Derive what follows from other fields, then raise all problems together."""
        check_types(self)
        self._derive_layers()
        self._derive_parallel()
        self.virtual_pipeline_model_parallel_size = self.derived_virtual_stages(
            self.pipeline_model_parallel_size,
            self.virtual_pipeline_model_parallel_size,
            self.pipeline_schedule,
        )
        self.derive_shape(heads_share_width=not self.multi_latent_attention)
        if self.fp32_residual_connection and self.pipeline_dtype is None:
            self.pipeline_dtype = torch.float32  # stages hand on the residual stream
        self.derive_maximal_update(self.hidden_size)
        self.derive_initialization(self.num_layers, self.hidden_init_factor)
        self.derive_recompute()
        self.derive_mixers(self.hidden_size)
        self.derive_experts(self.ffn_hidden_size, self.recompute_modules)
        problems = [
            *self.check_shape(),
            *self.check_parallel(),
            *self.check_block(),
            *self.check_latent_attention(),
            *self.check_linear_attention(self.num_layers, self.tensor_model_parallel_size),
            *self.check_query_key_clip(),
            *self.check_maximal_update(),
            *self.check_prediction(),
            *self.check_low_precision(self.mlp_chunks_for_training),
            *self._check_combinations(),
            *self.check_recompute(
                self.sequence_parallel,
                self.multi_latent_attention,
                self.moe_shared_expert_overlap,
            ),
            *self.check_activation_offload(
                self.recompute_granularity, self.recompute_modules or ()
            ),
            *self.check_experts(
                self.num_layers,
                self.expert_model_parallel_size,
                self.expert_tensor_parallel_size,
                self.mlp_chunks_for_training,
            ),
            *overlap_f_b_problems(self),
            *self.graph_problems(),
            *refused_settings(self),
        ]
        if not problems:
            problems = [*self._sparse_attention_problems(), *self._check_splits()]
        raise_together(problems, summary=type(self).__name__)
        warn_of_unused_settings(self)

    def offloads(self, module: str) -> bool:
        """Return whether what this part of a layer saves is kept in host memory."""
        is_dropped = any(map(self.recomputes, DROPPED_BY.get(module, ())))
        return module in self.modules_to_offload and not is_dropped

    @property
    def num_offloaded_layers(self) -> int:
        """Layers of a chunk, from its first, of which everything saved is kept there."""
        return 0 if self.overlap_moe_expert_parallel_comm else self.cpu_offloading_num_layers

    def _derive_layers(self) -> None:
        """Fill what the letters of the layers say of their number, experts and stages."""
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
        """Whether what crosses a stage boundary has the rows of an encoder and of a decoder."""
        return self.encoder_num_layers is not None

    def layer_kinds(self) -> tuple[LayerKind, ...]:
        """Return what each layer of the model is made of."""
        return self.kinds_of_layers(self.layers_with_experts(self.num_layers))

    def layer_kind(self, layer_number: int) -> LayerKind:
        """Return what a layer is made of, by its 1-based number in the whole model; the layers of
        `prediction_kinds` have the numbers after the last one."""
        kinds = (*self.layer_kinds(), *chain.from_iterable(self.prediction_kinds()))
        return kinds[min(layer_number, len(kinds)) - 1]

    def prediction_kinds(self) -> tuple[tuple[LayerKind, ...], ...]:
        """Return what the layers of each depth of multi-token prediction are made of."""
        depths = range(1, self.num_built_prediction_layers + 1)
        if self.pattern is None:
            return (self.layer_kinds()[-1:],) * len(depths)
        return tuple(self.pattern.kinds_of_depth(depth) for depth in depths)

    def _sparse_attention_problems(self) -> list[MegatronError]:
        return self.check_sparse_attention(
            is_used=any(
                kind.is_sparse for kind in chain(self.layer_kinds(), *self.prediction_kinds())
            ),
            has_latents=self.multi_latent_attention,
            q_lora_rank=self.q_lora_rank,
            rotated=self.qk_pos_emb_head_dim,
        )

    def _check_combinations(self) -> list[MegatronError]:
        """Return which fields of different groups exclude each other."""
        problems: list[MegatronError] = []
        pattern = self.window_attn_skip_freq
        if isinstance(pattern, list) and (len(pattern) != self.num_layers or set(pattern) - {0, 1}):
            problems.append(
                ConfigError(
                    f"window_attn_skip_freq gives {len(pattern)} layers for a model of"
                    f" {self.num_layers}.",
                    rule="the pattern is one 0 or 1 per layer",
                    flags=["--window-attn-skip-freq", "--num-layers"],
                    fix="use a number N, or a list expression of the right length",
                )
            )
        pattern_of_letters = self.hybrid_layer_pattern or ""
        if "E" in pattern_of_letters and self.num_moe_experts is None:
            problems.append(
                ConfigError(
                    f"hybrid_layer_pattern={pattern_of_letters!r} without experts.",
                    rule="E is a layer of experts",
                    flags=["--hybrid-layer-pattern", "--num-experts"],
                    fix="set --num-experts, or write - in place of E",
                )
            )
        if "+" in pattern_of_letters and not self.multi_latent_attention:
            problems.append(
                ConfigError(
                    f"hybrid_layer_pattern={pattern_of_letters!r} without latents.",
                    rule="+ is attention with latents",
                    flags=["--hybrid-layer-pattern", "--multi-latent-attention"],
                    fix="set --multi-latent-attention, or write * in place of +",
                )
            )
        later = pattern_of_letters.split("/")[1:]
        fitting = {self.mtp_num_layers} if len(set(later)) > 1 else {self.mtp_num_layers, 1}
        if later and (len(later) not in fitting or self.mtp_use_repeated_layer > len(fitting) - 1):
            problems.append(
                ConfigError(
                    f"hybrid_layer_pattern={pattern_of_letters!r} with mtp_num_layers="
                    f"{self.mtp_num_layers}, mtp_use_repeated_layer={self.mtp_use_repeated_layer}.",
                    rule="letters are given for every depth, or once for all of them; a layer that"
                    " is used for all depths has one kind",
                    flags=[
                        "--hybrid-layer-pattern",
                        "--mtp-num-layers",
                        "--mtp-use-repeated-layer",
                    ],
                    fix=f"drop --mtp-use-repeated-layer and use --mtp-num-layers {len(later)}",
                )
            )
        if pattern_of_letters and self.use_parallel_residual:
            problems.append(
                ConfigError(
                    "hybrid_layer_pattern with use_parallel_residual.",
                    rule="a layer of one letter has no second part beside the first",
                    flags=["--hybrid-layer-pattern", "--use-parallel-residual"],
                    fix="drop --use-parallel-residual",
                )
            )
        if self.cross_entropy_loss_fusion and self.final_logit_softcapping:
            problems.append(
                ConfigError(
                    "cross_entropy_loss_fusion with final_logit_softcapping.",
                    rule="the fused loss computes its logits by one product, without a bound",
                    flags=["--cross-entropy-loss-fusion", "--final-logit-softcapping"],
                    fix="drop --cross-entropy-loss-fusion",
                )
            )
        if self.attention_output_gate and self.multi_latent_attention:
            problems.append(
                ConfigError(
                    "attention_output_gate with multi-latent attention.",
                    rule="the gate is a part of the projection to whole query heads",
                    flags=["--attention-output-gate", "--multi-latent-attention"],
                    fix="drop --attention-output-gate",
                )
            )
        if self.rotary_base_local is not None and (
            self.multi_latent_attention or self.mtp_num_layers
        ):
            problems.append(
                ConfigError(
                    f"rotary_base_local={self.rotary_base_local} with multi-latent attention or"
                    " multi-token prediction.",
                    rule="only the layers of a plain decoder have positions by kind of layer",
                    flags=["--rotary-base-local", "--multi-latent-attention", "--mtp-num-layers"],
                    fix="drop --rotary-base-local",
                )
            )
        return problems

    def _check_splits(self) -> list[MegatronError]:
        """Return what cannot be split over the tensor-parallel ranks."""
        tp = self.tensor_model_parallel_size
        problems: list[MegatronError] = []
        assert self.num_query_groups and self.kv_channels and self.ffn_hidden_size
        if self.num_attention_heads % tp:
            problems.append(
                ConfigError(
                    f"num_attention_heads={self.num_attention_heads} cannot be split over"
                    f" tensor-parallel size {tp}.",
                    rule="each tensor-parallel rank owns a whole number of query heads",
                    flags=["--num-attention-heads", "--tensor-model-parallel-size"],
                    fix="use --tensor-model-parallel-size"
                    f" {best_divisor(self.num_attention_heads, tp)}",
                )
            )
        groups = self.num_query_groups
        if groups % tp and tp % groups:
            problems.append(
                ConfigError(
                    f"num_query_groups={groups} does not fit tensor-parallel size {tp}.",
                    rule="one of the two divides the other: ranks own whole key/value heads, or"
                    " share one",
                    flags=["--num-query-groups", "--tensor-model-parallel-size"],
                    fix=f"use --tensor-model-parallel-size {best_divisor(groups, tp)}",
                )
            )
        if self.ffn_hidden_size % tp:
            problems.append(
                ConfigError(
                    f"ffn_hidden_size={self.ffn_hidden_size} cannot be split over tensor-parallel"
                    f" size {tp}.",
                    rule="each tensor-parallel rank owns an equal part of the MLP",
                    flags=["--ffn-hidden-size", "--tensor-model-parallel-size"],
                    fix=f"use --ffn-hidden-size {-(-self.ffn_hidden_size // tp) * tp}",
                )
            )
        return [*problems, *context_parallel_problems(self)]


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
