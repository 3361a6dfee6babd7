"""The config of a transformer: flat for callers, assembled from small groups.

Every group checks itself; all problems are raised in one error. Derived values are filled once,
on construction.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import chain
from typing import Any

import torch

from megatron.core.foundation.errors import ConfigError, MegatronError, raise_together
from megatron.core.model_parallel_config import ModelParallelConfig
from megatron.core.settings.field_types import check_types
from megatron.core.settings.flags import flag
from megatron.core.settings.inert_flags import (
    refused_settings,
    warn_of_unused_settings,
    with_inert_fields,
)
from megatron.core.transformer.config.attention import (
    LatentAttentionConfig,
    PositionConfig,
    QueryKeyClipConfig,
    SparseAttentionConfig,
    latent_attention_problems,
    sparse_attention_problems,
)
from megatron.core.transformer.config.block import BlockConfig, block_problems
from megatron.core.transformer.config.experts import ExpertConfig, derive_experts, expert_problems
from megatron.core.transformer.config.field_values import POSITIVE, value_problems
from megatron.core.transformer.config.layer_kinds import LayerKind
from megatron.core.transformer.config.layer_sizes import (
    PATH_FLAG,
    key_value_problems,
    layer_sizes_problems,
    read_file,
    shared_key_value_problems,
    shared_latent_problems,
)
from megatron.core.transformer.config.linear_attention import (
    LinearAttentionConfig,
    derive_mixers,
    linear_attention_problems,
)
from megatron.core.transformer.config.precision import (
    DROPPED_BY,
    ActivationOffloadConfig,
    GraphConfig,
    PrecisionConfig,
    RecomputeConfig,
    activation_offload_problems,
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
    shape_problems,
)
from megatron.core.transformer.config.stages import (
    PredictionConfig,
    StageConfig,
    context_parallel_problems,
    derive_virtual_stages,
    overlap_f_b_problems,
)
from megatron.core.transformer.norm import NORMS
from megatron.core.transformer.yarn import derive_yarn
from megatron.core.utils import best_divisor


def combination_problems(config: TransformerConfig) -> Iterator[MegatronError]:
    """Yield the problems of fields of different groups that exclude each other."""
    pattern = config.window_attn_skip_freq
    if isinstance(pattern, list) and (len(pattern) != config.num_layers or set(pattern) - {0, 1}):
        yield ConfigError(
            f"window_attn_skip_freq gives {len(pattern)} layers for a model of"
            f" {config.num_layers}.",
            rule="the pattern is one 0 or 1 per layer",
            flags=["--window-attn-skip-freq", "--num-layers"],
            fix="use a number N, or a list expression of the right length",
        )
    pattern_of_letters = config.hybrid_layer_pattern or ""
    if "E" in pattern_of_letters and config.num_moe_experts is None:
        yield ConfigError(
            f"hybrid_layer_pattern={pattern_of_letters!r} without experts.",
            rule="E is a layer of experts",
            flags=["--hybrid-layer-pattern", "--num-experts"],
            fix="set --num-experts, or write - in place of E",
        )
    if "+" in pattern_of_letters and not config.multi_latent_attention:
        yield ConfigError(
            f"hybrid_layer_pattern={pattern_of_letters!r} without latents.",
            rule="+ is attention with latents",
            flags=["--hybrid-layer-pattern", "--multi-latent-attention"],
            fix="set --multi-latent-attention, or write * in place of +",
        )
    later = pattern_of_letters.split("/")[1:]
    fitting = {config.mtp_num_layers} if len(set(later)) > 1 else {config.mtp_num_layers, 1}
    if later and (len(later) not in fitting or config.mtp_use_repeated_layer > len(fitting) - 1):
        yield ConfigError(
            f"hybrid_layer_pattern={pattern_of_letters!r} with mtp_num_layers="
            f"{config.mtp_num_layers}, mtp_use_repeated_layer={config.mtp_use_repeated_layer}.",
            rule="letters are given for every depth, or once for all of them; a layer that"
            " is used for all depths has one kind",
            flags=[
                "--hybrid-layer-pattern",
                "--mtp-num-layers",
                "--mtp-use-repeated-layer",
            ],
            fix=f"drop --mtp-use-repeated-layer and use --mtp-num-layers {len(later)}",
        )
    if pattern_of_letters and config.use_parallel_residual:
        yield ConfigError(
            "hybrid_layer_pattern with use_parallel_residual.",
            rule="a layer of one letter is either a mixer or an MLP, not both",
            flags=["--hybrid-layer-pattern", "--use-parallel-residual"],
            fix="drop --use-parallel-residual",
        )
    if config.cross_entropy_loss_fusion and config.final_logit_softcapping:
        yield ConfigError(
            "cross_entropy_loss_fusion with final_logit_softcapping.",
            rule="the fused loss computes its logits by one product, without a bound",
            flags=["--cross-entropy-loss-fusion", "--final-logit-softcapping"],
            fix="drop --cross-entropy-loss-fusion",
        )
    if config.num_residual_streams > 1 and config.sends_both_stacks:
        flag = "--enable-mhc-connections" if config.enable_mhc_connections else "--altup-num-inputs"
        yield ConfigError(
            "several residual streams with an encoder and a decoder.",
            rule="a decoder reads the encoder's output as one stream",
            flags=[flag, "--encoder-num-layers"],
            fix=f"drop {flag}",
        )
    if config.multi_latent_attention and (
        given := [
            name
            for name in ("qk_layernorm_across_heads", "qk_layernorm_after_rope", "reordered_norm")
            if getattr(config, name)
        ]
    ):
        yield ConfigError(
            f"{', '.join(given)} with multi-latent attention.",
            rule="latent attention norms its input and its latents",
            flags=[*("--" + name.replace("_", "-") for name in given), "--multi-latent-attention"],
            fix="drop them, or --multi-latent-attention",
        )
    excluded = {
        "--multi-latent-attention": config.multi_latent_attention,
        "--attention-output-gate": config.attention_output_gate,
        "--encoder-num-layers": config.encoder_num_layers is not None,
    }
    if config.v_channels is not None and any(excluded.values()):
        wrong = [flag for flag, is_on in excluded.items() if is_on]
        yield ConfigError(
            f"v_channels={config.v_channels} with {', '.join(wrong)}.",
            rule="only the self-attention of a decoder without gates has values of another width",
            flags=["--v-channels", *wrong],
            fix="drop --v-channels",
        )
    if config.attention_value_scale != 1.0 and config.multi_latent_attention:
        yield ConfigError(
            f"attention_value_scale={config.attention_value_scale} with multi-latent attention.",
            rule="it multiplies whole value heads",
            flags=["--attention-value-scale", "--multi-latent-attention"],
            fix="drop --attention-value-scale",
        )
    if config.qk_l2_norm and (config.qk_layernorm or config.multi_latent_attention):
        yield ConfigError(
            "qk_l2_norm with qk_layernorm or multi-latent attention.",
            rule="whole heads of queries and keys have one norm",
            flags=["--qk-l2-norm", "--qk-layernorm", "--multi-latent-attention"],
            fix="drop --qk-l2-norm",
        )
    if config.rotary_base_local is not None and (
        config.multi_latent_attention or config.mtp_num_layers
    ):
        yield ConfigError(
            f"rotary_base_local={config.rotary_base_local} with multi-latent attention or"
            " multi-token prediction.",
            rule="only the layers of a plain decoder have positions by kind of layer",
            flags=["--rotary-base-local", "--multi-latent-attention", "--mtp-num-layers"],
            fix="drop --rotary-base-local",
        )


def view_problems(config: TransformerConfig) -> Iterator[MegatronError]:
    """Yield the problems of the sizes of each layer, where layers have their own."""
    seen: list[dict[str, Any]] = []
    for layer, block in enumerate(config.blocks, 1):
        changes = block.changes(config)
        if changes in seen:
            continue
        seen.append(changes)
        view, kind = config.of_layer(layer), config.layer_kind(layer)
        checks: list[Callable[[Any], Iterable[MegatronError]]] = [
            shape_problems, block_problems, split_problems, context_parallel_problems,
            key_value_problems,
        ]  # fmt: skip
        found = chain(
            block.problems(config, kind),
            *(check(view) for check in checks + [expert_problems] * kind.has_experts),
        )
        yield from (problem.named(f"layer {layer}") for problem in found)
    if config.mtp_num_layers and config.rotary_of(config.num_layers):
        yield ConfigError(
            f"layer {config.num_layers} rotates by its own angles in a model with"
            f" mtp_num_layers={config.mtp_num_layers}.",
            rule="layers of multi-token prediction copy the last layer and rotate by the angles of"
            " the model",
            flags=[PATH_FLAG, "--mtp-num-layers"],
            fix="give the last layer the rotary_base, rotary_percent and kv_channels of the model",
        )


def split_problems(config: TransformerConfig) -> Iterator[MegatronError]:
    """Yield an error for each size that cannot be split over the tensor-parallel ranks."""
    tp, width = config.tensor_model_parallel_size, config.ffn_hidden_size or 0
    if config.num_attention_heads % tp:
        yield ConfigError(
            f"num_attention_heads={config.num_attention_heads} cannot be split over"
            f" tensor-parallel size {tp}.",
            rule="each tensor-parallel rank owns a whole number of query heads",
            flags=["--num-attention-heads", "--tensor-model-parallel-size"],
            fix=f"use --tensor-model-parallel-size {best_divisor(config.num_attention_heads, tp)}",
        )
    groups = config.num_query_groups or 1
    if groups % tp and tp % groups:
        yield ConfigError(
            f"num_query_groups={groups} does not fit tensor-parallel size {tp}.",
            rule="one of the two divides the other: ranks own whole key/value heads, or share one",
            flags=["--num-query-groups", "--tensor-model-parallel-size"],
            fix=f"use --tensor-model-parallel-size {best_divisor(groups, tp)}",
        )
    if width % tp:
        yield ConfigError(
            f"ffn_hidden_size={width} cannot be split over tensor-parallel size {tp}.",
            rule="each tensor-parallel rank owns an equal part of the MLP",
            flags=["--ffn-hidden-size", "--tensor-model-parallel-size"],
            fix=f"use --ffn-hidden-size {-(-width // tp) * tp}",
        )


_DERIVATIONS: tuple[Callable[[Any], None], ...] = (
    derive_virtual_stages,
    derive_shape,
    derive_yarn,
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
    key_value_problems,
    linear_attention_problems,
    precision_problems,
    combination_problems,
    recompute_problems,
    activation_offload_problems,
    expert_problems,
    overlap_f_b_problems,
    graph_problems,
    layer_sizes_problems,
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
        path = self.heterogeneous_layers_config_path
        if path and not self.heterogeneous_layers_config_encoded_json:
            self.heterogeneous_layers_config_encoded_json = read_file(path)
        self._derive_layers()
        problems = list(value_problems(self))
        self._derive_parallel()
        if self.fp32_residual_connection and self.pipeline_dtype is None:
            self.pipeline_dtype = torch.float32  # stages send the residual stream
        for derive in _DERIVATIONS:
            derive(self)
        problems += [*self.check_parallel(), *refused_settings(self)]
        problems += chain.from_iterable(check(self) for check in _CHECKS)
        if not problems:  # these compute with the sizes
            kinds = chain(self.layer_kinds(), *self.prediction_kinds())
            checks = [split_problems, context_parallel_problems, view_problems]
            checks += [shared_key_value_problems, shared_latent_problems]
            if any(kind.is_sparse or kind.is_compressed for kind in kinds):
                checks.append(sparse_attention_problems)
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

    def of_layer(self, layer_number: int) -> TransformerConfig:
        """Return the config of one layer, by its 1-based number in the whole model.

        It is this config unless layers have sizes of their own.
        """
        changes = self.block(layer_number).changes(self)
        changes |= self.latent_changes(rotates=self.rotates_in(layer_number))
        if not changes:
            return self
        view = copy.copy(self)
        vars(view).update(changes)
        return view

    def rotary_of(self, layer_number: int) -> tuple[tuple[str, float], ...]:
        """Return the arguments of a layer's `RotaryEmbedding`, with their names, that differ from
        the model's arguments."""
        if self.multi_latent_attention:
            return ()  # such a layer computes its own angles
        found = self.block(layer_number).rotary
        if self.rotary_base_local is not None and "rotary_base" not in found:
            is_windowed = self.of_layer(layer_number).window_of(layer_number) is not None
            found |= {"rotary_base": self.rotary_base_local} if is_windowed else {}
        return tuple(sorted(found.items()))

    def _derive_layers(self) -> None:
        """Derive number, experts and stages of the layers from the letters of the layers."""
        try:
            pattern = self.pattern
        except ConfigError:
            return  # check_linear_attention reports it
        if pattern is None:
            return
        self.num_layers = self.num_layers or len(pattern.kinds)
        self.moe_layer_freq = pattern.layers_with_experts
        self.mtp_num_layers = self.mtp_num_layers or len(pattern.later) or None
        self.pipeline_model_parallel_layout = (
            self.pipeline_model_parallel_layout or pattern.pipeline_layout
        )

    @property
    def sends_both_stacks(self) -> bool:
        """Whether messages between stages contain the tokens of an encoder and of a decoder."""
        return self.encoder_num_layers is not None

    @property
    def num_residual_streams(self) -> int:
        """Number of residual streams of a token."""
        streams = self.mhc_num_residual_streams if self.enable_mhc_connections else 1
        return max(streams, self.altup_num_inputs)

    def layer_kinds(self) -> tuple[LayerKind, ...]:
        """Return the kind of each layer of the model."""
        return self._resolved(self.kinds_of_layers(self.layers_with_experts(self.num_layers)), 1)

    def _resolved(self, kinds: Sequence[LayerKind], first: int) -> tuple[LayerKind, ...]:
        """Fill what depends on the number of a layer; the first one has the number `first`."""
        found, has_letters = [], self.hybrid_layer_pattern is not None
        for number, kind in enumerate(kinds, first):
            ratio = self.compress_ratio(number) if kind.is_compressed else 0
            if has_letters and kind.chooses_entries:
                ratio = self.csa_indexed_ratio
            elif has_letters:
                ratio = kind.compress_ratio and (ratio or kind.compress_ratio)
            shares_keys = kind.is_sparse and self.shares_keys(number)
            chooses = ratio == self.csa_indexed_ratio
            found.append(
                replace(
                    kind, shares_keys=shares_keys, compress_ratio=ratio, chooses_entries=chooses
                )
            )
        return tuple(found)

    def is_reordered(self, layer_number: int) -> bool:
        """Whether a layer norms the outputs of its branches instead of their inputs."""
        return self.reordered_norm and not self.layer_kind(layer_number).is_recurrent

    def layer_kind(self, layer_number: int) -> LayerKind:
        """Return the kind of a layer, by its 1-based number in the whole model; the layers of
        `prediction_kinds` have the numbers after the last one."""
        kinds = (*self.layer_kinds(), *chain.from_iterable(self.prediction_kinds()))
        return kinds[min(layer_number, len(kinds)) - 1]

    def prediction_kinds(self) -> tuple[tuple[LayerKind, ...], ...]:
        """Return the kinds of the layers of each depth of multi-token prediction."""
        depths = range(1, self.num_built_prediction_layers + 1)
        if self.pattern is None:
            return ((replace(self.layer_kinds()[-1], shares_keys=False),),) * len(depths)
        found, number = [], self.num_layers + 1
        for kinds in map(self.pattern.kinds_of_depth, depths):
            found.append(self._resolved(kinds, number))
            number += len(kinds)
        return tuple(found)


@dataclass
class MLATransformerConfig(TransformerConfig):
    """The config of a model with multi-latent attention, with Megatron's defaults for one."""

    multi_latent_attention: bool = True
    q_lora_rank: int | None = flag(512, within=POSITIVE)
    normalization: str = flag("RMSNorm", choices=tuple(NORMS))
    max_position_embeddings: int | None = None
    """Another name of `original_max_position_embeddings`, which Megatron had first."""

    def __post_init__(self) -> None:
        """Read the other name, then derive and check as `TransformerConfig` does."""
        if self.max_position_embeddings is not None:
            self.original_max_position_embeddings = self.max_position_embeddings
        super().__post_init__()
