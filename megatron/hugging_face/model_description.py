"""Describe a model by Megatron's settings, which a `config.json` and a checkpoint both contain."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from megatron.core.foundation.errors import ConfigError
from megatron.core.transformer.config.block import BlockConfig
from megatron.core.transformer.config.experts import ExpertConfig
from megatron.core.transformer.config.layer_kinds import (
    DENSE,
    GATED_DELTA_NET,
    KIMI,
    MAMBA,
    SPARSE_ATTENTION,
    LayerKind,
)
from megatron.core.transformer.config.linear_attention import (
    MIXER_OF_VARIANT,
    LinearAttentionConfig,
)
from megatron.core.transformer.yarn import yarn_softmax_scale
from megatron.hugging_face.weight_map import Geometry


@dataclass(frozen=True, kw_only=True)
class ModelDescription:
    """The settings that affect a model's logits, by the names of their flags.

    A field with a default may be absent; a test compares its default with the flag's default.
    """

    num_layers: int
    hidden_size: int
    ffn_hidden_size: int
    num_attention_heads: int
    max_position_embeddings: int
    untie_embeddings_and_output_weights: bool
    unpadded_vocab_size: int
    architecture: str = "gpt"
    bert_binary_head: bool = True
    encoder_num_layers: int | None = None
    relative_attention_num_buckets: int = 32
    relative_attention_max_distance: int = 128
    scale_t5_logits: bool = False
    group_query_attention: bool = False
    num_query_groups: int = 1
    kv_channels: int | None = None
    position_embedding_type: str = "learned_absolute"
    rotary_base: float = 10000
    rotary_percent: float = 1.0
    rotary_interleaved: bool = False
    rope_interleave: bool = True
    rotary_seq_len_interpolation_factor: int | None = None
    use_rope_scaling: bool = False
    rope_scaling_factor: float = 8.0
    no_rope_freq: list[int] | None = None
    mrope_section: list[int] | None = None
    mrope_interleaved: bool = False
    rotary_base_local: float | None = None
    rotary_scaling_factor: float = 1.0
    original_max_position_embeddings: int = 4096
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    yarn_correction_range_round_to_int: bool = True
    mscale: float = 1.0
    mscale_all_dim: float = 0.0
    normalization: str = "LayerNorm"
    norm_epsilon: float = 1e-5
    apply_layernorm_1p: bool = False
    apply_residual_connection_post_layernorm: bool = False
    sandwich_norm: bool = False
    use_parallel_residual: bool = False
    embedding_multiplier: float = 1.0
    residual_multiplier: float = 1.0
    logits_scaling: float = 1.0
    swiglu: bool = False
    geglu: bool = False
    squared_relu: bool = False
    relu: bool = False
    quick_geglu: bool = False
    glu_linear_offset: float = 0.0
    activation_func_clamp_value: float | None = None
    openai_gelu: bool = False
    add_bias_linear: bool = True
    add_qkv_bias: bool = False
    qk_layernorm: bool = False
    attention_output_gate: bool = False
    window_size: tuple[int, int] | None = None
    window_attn_skip_freq: int | list[int] | None = None
    softmax_scale: float | None = None
    softmax_type: str = "vanilla"
    attn_logit_softcapping: float | None = None
    final_logit_softcapping: float | None = None
    hidden_dropout: float = 0.1
    attention_dropout: float = 0.1
    multi_latent_attention: bool = False
    q_lora_rank: int | None = None
    kv_lora_rank: int = 32
    qk_head_dim: int = 128
    qk_pos_emb_head_dim: int = 64
    v_head_dim: int = 128
    latent_norm_epsilon: float | None = None
    experimental_attention_variant: str | None = None
    linear_attention_freq: int | list[int] | None = None
    linear_conv_kernel_dim: int = 4
    linear_key_head_dim: int = 128
    linear_value_head_dim: int = 128
    linear_num_key_heads: int = 16
    linear_num_value_heads: int = 32
    hybrid_layer_pattern: str | None = None
    mamba_state_dim: int = 128
    mamba_head_dim: int = 64
    mamba_num_groups: int = 8
    mamba_num_heads: int | None = None
    mamba_step_limits: tuple[float, float] = (0.0, math.inf)
    dsa_indexer_head_dim: int | None = None
    dsa_indexer_n_heads: int | None = None
    dsa_indexer_topk: int | None = None
    dsa_indexer_k_norm_epsilon: float | None = None
    dsa_indexer_k_norm_fp32: bool = False
    dsa_indexer_rope_interleaved: bool = False
    dsa_indexer_scoring_relu: bool = True
    num_experts: int | None = None
    moe_layer_freq: int | list[int] = 1
    moe_ffn_hidden_size: int | None = None
    moe_latent_size: int | None = None
    moe_router_topk: int = 2
    moe_router_score_function: str = "softmax"
    moe_router_pre_softmax: bool = False
    moe_router_topk_scaling_factor: float | None = None
    moe_router_num_groups: int | None = None
    moe_router_group_topk: int | None = None
    moe_router_group_score_topk: int | None = None
    moe_router_enable_expert_bias: bool = False
    moe_router_dtype: str | None = None
    moe_shared_expert_intermediate_size: int | None = None
    moe_shared_expert_gate: bool = False
    moe_expert_capacity_factor: float | None = None
    mtp_num_layers: int | None = None
    mtp_use_repeated_layer: bool = False
    vision_model_type: str = "qwen2_5_vl"
    vision_num_layers: int = 32
    vision_hidden_size: int = 1280
    vision_num_attention_heads: int = 16
    vision_ffn_hidden_size: int = 3420
    num_channels: int = 3
    patch_dim: int = 16
    temporal_patch_size: int = 2
    spatial_merge_size: int = 2
    vision_window_size: int = 112
    vision_full_attention_layers: list[int] | None = None
    vision_num_position_embeddings: int = 2304
    deepstack_layers: list[int] | None = None
    image_token_id: int | None = None
    vision_start_token_id: int | None = None
    vision_end_token_id: int | None = None

    @classmethod
    def from_values(cls, values: Mapping[str, Any]) -> ModelDescription:
        """Describe the model of a run by its settings, for example `vars(args)` of a checkpoint.

        Raises:
            ConfigError: sizes are missing, or the model was trained with --use-mup.
        """
        if values.get("use_mup"):
            raise ConfigError(
                "the model was trained with --use-mup.",
                rule="no supported Hugging Face family has muP's factors on attention and logits",
                flags=["--use-mup"],
                fix="keep the model in the checkpoint format of this project",
            )
        known = dataclasses.fields(cls)
        found = {f.name: values[f.name] for f in known if values.get(f.name) is not None}
        missing = [f.name for f in known if _is_required(f) and f.name not in found]
        if missing:
            raise ConfigError(
                f"the settings of the model lack {', '.join(missing)}.",
                rule="an export needs the settings of the training run",
                fix="use a checkpoint that contains the settings of its run",
            )
        return cls(**found)

    def stated(self) -> dict[str, Any]:
        """Return the settings that differ from the defaults, by the names of their flags.

        Required settings and the settings that distinguish all models are always included.
        """
        always = {"group_query_attention", "position_embedding_type"}
        if self.has_rotary_positions:
            always.add("rotary_base")
        return {
            field.name: value
            for field in dataclasses.fields(self)
            for value in [getattr(self, field.name)]
            if field.name in always or _is_required(field) or value != field.default
        }

    @property
    def has_rotary_positions(self) -> bool:
        """Whether the model has rotary positions."""
        return self.position_embedding_type in ("rope", "yarn", "mrope")

    @property
    def num_key_value_heads(self) -> int:
        """The number of key/value heads."""
        return self.num_query_groups if self.group_query_attention else self.num_attention_heads

    @property
    def head_dim(self) -> int:
        """The width of a head."""
        return self.kv_channels or self.hidden_size // self.num_attention_heads

    @property
    def geometry(self) -> Geometry:
        """The numbers that weight rules use."""
        return Geometry(
            num_layers=self.num_layers,
            num_heads=self.num_attention_heads,
            num_groups=self.num_key_value_heads,
            head_dim=self.head_dim,
        )

    @property
    def experts_width(self) -> int:
        """The width of an expert."""
        return self.moe_ffn_hidden_size or self.ffn_hidden_size

    @property
    def layers_with_experts(self) -> list[bool]:
        """Whether each layer has experts."""
        experts = ExpertConfig(num_moe_experts=self.num_experts, moe_layer_freq=self.moe_layer_freq)
        return experts.layers_with_experts(self.num_layers)

    @property
    def mamba_heads(self) -> int:
        """The number of heads of a Mamba-2 layer."""
        return self.mamba_num_heads or 2 * self.hidden_size // self.mamba_head_dim

    @property
    def mixers(self) -> LinearAttentionConfig:
        """The settings of recurrent mixers."""
        fields = dataclasses.fields(LinearAttentionConfig)
        return LinearAttentionConfig(**{f.name: getattr(self, f.name) for f in fields})

    @property
    def layer_kinds(self) -> tuple[LayerKind, ...]:
        """The mixer and MLP of each layer."""
        return self.mixers.kinds_of_layers(self.layers_with_experts)

    def layers_where(self, holds: Callable[[LayerKind], object]) -> tuple[int, ...]:
        """Return the numbers, from 0, of the layers whose kind fulfils a condition."""
        return tuple(number for number, kind in enumerate(self.layer_kinds) if holds(kind))

    @property
    def windowed_layers(self) -> list[bool]:
        """Whether each layer uses the window, if the model has one."""
        block = BlockConfig(window_size=(0, 0), window_attn_skip_freq=self.window_attn_skip_freq)
        return [block.window_of(n + 1) is not None for n in range(self.num_layers)]

    @property
    def scale_of_scores(self) -> float | None:
        """The factor on attention scores; None with latent attention, which has its own factor."""
        if self.multi_latent_attention:
            return None
        if self.softmax_scale is None and self.position_embedding_type == "yarn":
            return yarn_softmax_scale(self.head_dim, self.rotary_scaling_factor, self.mscale)
        return self.softmax_scale or self.head_dim**-0.5


def _is_required(field: dataclasses.Field[Any]) -> bool:
    return field.default is dataclasses.MISSING


_YARN = (
    "rotary_scaling_factor", "original_max_position_embeddings", "beta_fast", "beta_slow",
    "yarn_correction_range_round_to_int", "mscale", "mscale_all_dim",
)  # fmt: skip
_OF_LATENTS = ("q_lora_rank", "kv_lora_rank", "qk_head_dim", "qk_pos_emb_head_dim", "v_head_dim",
               "latent_norm_epsilon")  # fmt: skip
_DEFAULTS = {
    field.name: field.default
    for field in dataclasses.fields(ModelDescription)
    if not _is_required(field)
}
_OF_ALL_MIXERS = {"linear_conv_kernel_dim", "linear_attention_freq"}
_OF_TRAINING = {
    "hidden_dropout": 0.0, "attention_dropout": 0.0, "moe_router_dtype": None,
    "unpadded_vocab_size": 0, "dsa_indexer_k_norm_fp32": False,
}  # fmt: skip
"""Fields that do not affect logits -> the value that replaces any value in comparisons."""


def differences(one: ModelDescription, other: ModelDescription) -> list[str]:
    """Describe the differences between two models that affect logits."""
    first, second = _canonical(one), _canonical(other)
    pairs = {
        field.name: (getattr(first, field.name), getattr(second, field.name))
        for field in dataclasses.fields(ModelDescription)
    }
    return [f"{name} {a!r} would become {b!r}" for name, (a, b) in pairs.items() if a != b]


def _canonical(model: ModelDescription) -> ModelDescription:
    """Return a description that is equal for all models with the same logits."""
    has_latents = model.multi_latent_attention
    has_experts, windowed = model.layers_with_experts, model.windowed_layers
    without_effect: set[str] = set()
    if not model.has_rotary_positions or (model.no_rope_freq and all(model.no_rope_freq)):
        without_effect |= {n for n in _DEFAULTS if n.startswith(("rotary", "rope", "use_rope"))}
    is_stretched = model.position_embedding_type == "yarn" or has_latents
    if not is_stretched or model.rotary_scaling_factor == 1.0:
        without_effect |= set(_YARN)
    if not model.use_rope_scaling:
        without_effect.add("rope_scaling_factor")
    if model.add_bias_linear:
        without_effect.add("add_qkv_bias")  # add_bias_linear includes these biases
    if model.num_experts is None:
        without_effect |= {name for name in _DEFAULTS if name.startswith("moe_")}
    mixers = {kind.mixer for kind in model.layer_kinds}
    for of_sizes, prefix in (({GATED_DELTA_NET, KIMI}, "linear_"), ({MAMBA}, "mamba_"),
                             ({SPARSE_ATTENTION}, "dsa_")):  # fmt: skip
        if not mixers & of_sizes:
            without_effect |= {n for n in _DEFAULTS if n.startswith(prefix)} - _OF_ALL_MIXERS
    if not mixers & {GATED_DELTA_NET, KIMI, MAMBA, SPARSE_ATTENTION}:
        without_effect |= {"experimental_attention_variant", *_OF_ALL_MIXERS}
    if model.position_embedding_type != "mrope":
        without_effect |= {"mrope_section", "mrope_interleaved"}
    without_effect |= _of_other_encoders(model)
    if model.architecture != "bert":
        without_effect.add("bert_binary_head")
    if model.moe_router_topk_scaling_factor == 1.0:
        without_effect.add("moe_router_topk_scaling_factor")
    without_effect |= (
        {"kv_channels", "group_query_attention", "num_query_groups", "rotary_interleaved"}
        if has_latents
        else {*_OF_LATENTS, "rope_interleave"}
    )
    plain: dict[str, Any] = {name: _DEFAULTS[name] for name in without_effect} | _OF_TRAINING
    model = replace(model, softmax_scale=model.scale_of_scores)
    if has_latents:
        epsilon = model.latent_norm_epsilon or model.norm_epsilon
        model = replace(model, latent_norm_epsilon=epsilon)
    else:
        model = replace(
            model,
            kv_channels=model.head_dim,
            group_query_attention=False,
            num_query_groups=model.num_key_value_heads,
        )
    if model.num_experts is not None:
        model = replace(model, moe_ffn_hidden_size=model.experts_width)
    if all(kind.mlp != DENSE for kind in model.layer_kinds):
        model = replace(model, ffn_hidden_size=0)
    if not any(kind.attends for kind in model.layer_kinds):
        model = replace(model, num_attention_heads=0, num_query_groups=0, kv_channels=0)
        model = replace(model, max_position_embeddings=0, softmax_scale=None)
    if "experimental_attention_variant" not in without_effect and not model.hybrid_layer_pattern:
        variant = MIXER_OF_VARIANT[model.experimental_attention_variant or ""]
        has_it = [int(kind.mixer == variant) for kind in model.layer_kinds]
        model = replace(model, experimental_attention_variant=variant, linear_attention_freq=has_it)
    if SPARSE_ATTENTION in mixers and model.dsa_indexer_k_norm_epsilon is None:
        model = replace(model, dsa_indexer_k_norm_epsilon=model.norm_epsilon)
    if MAMBA in mixers:
        model = replace(model, mamba_num_heads=model.mamba_heads)
    window = model.window_size
    return replace(
        replace(model, **plain),
        moe_layer_freq=[int(has_some) for has_some in has_experts],
        window_size=None if window is None else (window[0], window[1]),
        window_attn_skip_freq=[int(window is not None and has_one) for has_one in windowed],
    )


_OF_IMAGES = {"num_channels", "patch_dim", "temporal_patch_size", "spatial_merge_size"}
_OF_WINDOWS = {"vision_window_size", "vision_full_attention_layers"}
_OF_LAYERS = {"vision_num_position_embeddings", "deepstack_layers"}


def _of_other_encoders(model: ModelDescription) -> set[str]:
    """Return the settings of images that do not affect this model."""
    if model.architecture != "vlm":
        named = {n for n in _DEFAULTS if n.startswith("vision_")}
        return named | _OF_IMAGES | _OF_WINDOWS | _OF_LAYERS | {"image_token_id"}
    # Only the preprocessing of samples uses these two tokens.
    around = {"vision_start_token_id", "vision_end_token_id"}
    return around | (_OF_LAYERS if model.vision_model_type == "qwen2_5_vl" else _OF_WINDOWS)
