"""Describe a model by Megatron's settings, which a `config.json` and a checkpoint both contain."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from megatron.core.foundation.errors import ConfigError
from megatron.core.models.model_settings import (
    EncoderSettings,
    ExpertSettings,
    LatentAttentionSettings,
    ModelSettings,
    VisionSettings,
)
from megatron.core.transformer.config.layer_kinds import (
    DENSE,
    GATED_DELTA_NET,
    KIMI,
    MAMBA,
    SHORT_CONV,
    SPARSE_ATTENTION,
    LayerKind,
)
from megatron.core.transformer.config.linear_attention import MIXER_OF_VARIANT
from megatron.core.transformer.yarn import yarn_softmax_scale

_OF_TRAINING = {
    "init_method", "output_layer_init_method", "embedding_init_method", "init_method_std",
    "embedding_init_method_std", "init_method_xavier_uniform", "use_mup", "mup_base_hidden_size",
    "mup_width_mult", "mup_base_head_dim", "mup_attn_scale_power", "mup_embedding_mult",
    "mup_output_mult", "qk_clip", "qk_clip_threshold", "qk_clip_alpha", "log_max_attention_logit",
    "apply_rope_fusion", "dsa_indexer_loss_coeff", "dsa_indexer_use_sparse_loss",
    "dsa_kernel_backend", "transformer_impl", "gated_linear_unit", "activation_func",
    "attention_softmax_in_fp32", "apply_query_key_layer_scaling", "attention_backend", "preset",
    "seq_length", "use_rotary_position_embeddings", "add_position_embedding",
    "make_vocab_size_divisible_by", "spec", "mtp_loss_scaling_factor", "rope_type",
    "moe_token_dispatcher_type", "moe_flex_dispatcher_backend", "moe_enable_deepep",
    "moe_flex_dispatcher_num_sms", "moe_deepep_num_sms", "moe_hybridep_num_sms", "moe_grouped_gemm",
    "moe_layer_recompute", "moe_router_bias_update_rate", "moe_router_load_balancing_type",
    "moe_aux_loss_coeff", "moe_z_loss_coeff", "moe_input_jitter_eps",
    "moe_router_force_load_balancing", "moe_token_drop_policy", "moe_pad_expert_input_to_capacity",
    "moe_expert_rank_capacity_factor", "moe_shared_expert_overlap", "moe_per_layer_logging",
    "decoder_num_layers", "decoder_seq_length", "mask_prob", "short_seq_prob", "freeze_lm",
    "freeze_vit", "freeze_projection", "image_min_pixels", "image_max_pixels", "image_mean",
    "image_std", "heterogeneous_layers_config_path",
}  # fmt: skip
"""Settings that change training, speed or data, or that repeat another setting: a description
leaves them out."""
FLAG_OF = {
    "layernorm_epsilon": "norm_epsilon",
    "layernorm_zero_centered_gamma": "apply_layernorm_1p",
    "num_moe_experts": "num_experts",
}
"""Setting -> its flag, where the two names differ."""


@dataclass(kw_only=True)
class ModelDescription(
    ModelSettings, LatentAttentionSettings, ExpertSettings, EncoderSettings, VisionSettings
):
    """The settings of a run that affect the logits of its model."""

    num_layers: int = field()
    hidden_size: int = field()
    ffn_hidden_size: int = field()
    num_attention_heads: int = field()
    num_query_groups: int = 1
    seq_length: int = 0
    max_position_embeddings: int = field()
    untie_embeddings_and_output_weights: bool = field()
    unpadded_vocab_size: int = field()

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
        flags = {f.name: FLAG_OF.get(f.name, f.name) for f in described_fields()}
        found = {name: values[flag] for name, flag in flags.items() if values.get(flag) is not None}
        missing = [f.name for f in described_fields() if _is_required(f) and f.name not in found]
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
            FLAG_OF.get(field.name, field.name): value
            for field in described_fields()
            for value in [getattr(self, field.name)]
            if field.name in always or _is_required(field) or value != field.default
        }

    def fields(self, names: Mapping[str, str]) -> dict[str, Any]:
        """Return the fields of a config that have the same values as settings.

        Args:
            names: field -> setting.
        """
        return {name: getattr(self, setting) for name, setting in names.items()}

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
    def value_dim(self) -> int:
        """The width of a value head."""
        return self.v_channels or self.head_dim

    def of_layer(self, layer_number: int) -> ModelDescription:
        """Return the settings of one layer, by its 1-based number."""
        changes = self.block(layer_number).changes(self)
        if changes:
            changes["group_query_attention"] = True
        if self.num_kv_shared_layers:
            shared = self.num_layers if self.shares_key_value(layer_number) else 0
            changes["num_kv_shared_layers"] = shared
        return replace(self, **changes) if changes else self

    @property
    def projections(self) -> str:
        """The letters of the projections before attention, in each layer."""
        if self.num_kv_shared_layers:
            return "q"
        return "qk" if self.attention_k_eq_v else "qkv"

    @property
    def experts_width(self) -> int:
        """The width of an expert."""
        return self.moe_ffn_hidden_size or self.ffn_hidden_size

    @property
    def mamba_heads(self) -> int:
        """The number of heads of a Mamba-2 layer."""
        return self.mamba_num_heads or 2 * self.hidden_size // self.mamba_head_dim

    @property
    def has_experts(self) -> list[bool]:
        """Whether each layer has experts."""
        return self.layers_with_experts(self.num_layers)

    @property
    def layer_kinds(self) -> tuple[LayerKind, ...]:
        """The mixer and MLP of each layer."""
        return self.kinds_of_layers(self.has_experts)

    def layers_where(self, holds: Callable[[LayerKind], object]) -> tuple[int, ...]:
        """Return the numbers, from 0, of the layers whose kind fulfils a condition."""
        return tuple(number for number, kind in enumerate(self.layer_kinds) if holds(kind))

    @property
    def windowed_layers(self) -> list[bool]:
        """Whether each layer uses the window, if the model has one."""
        model = replace(self, window_size=(0, 0))
        return [model.window_of(n + 1) is not None for n in range(self.num_layers)]

    @property
    def scale_of_scores(self) -> float | None:
        """The factor on attention scores; None with latent attention, which has its own factor."""
        if self.multi_latent_attention:
            return None
        if self.softmax_scale is None and self.position_embedding_type == "yarn":
            return yarn_softmax_scale(
                self.head_dim, self.rotary_scaling_factor, self.mscale, self.mscale_all_dim
            )
        return self.softmax_scale or self.head_dim**-0.5

    @property
    def local_scale_of_scores(self) -> float | None:
        """The factor on attention scores in layers with a window, if it differs."""
        if self.window_size is None:
            return None
        found = self.softmax_scale_local
        has_own = self.rotary_base_local is not None and self.position_embedding_type == "yarn"
        if found is None and self.softmax_scale is None and has_own:
            found = 1 / math.sqrt(self.head_dim)
        return None if found == self.scale_of_scores else found


def described_fields() -> list[dataclasses.Field[Any]]:
    """Return the fields that a description has a value for."""
    return [f for f in dataclasses.fields(ModelDescription) if f.name not in _OF_TRAINING]


def _is_required(field: dataclasses.Field[Any]) -> bool:
    return field.default is dataclasses.MISSING


_CONTEXT = "original_max_position_embeddings"
_YARN = (
    "rotary_scaling_factor", _CONTEXT, "beta_fast", "beta_slow",
    "yarn_correction_range_round_to_int", "mscale", "mscale_all_dim",
)  # fmt: skip
_OF_LATENTS = ("q_lora_rank", "kv_lora_rank", "qk_head_dim", "qk_pos_emb_head_dim", "v_head_dim",
               "latent_norm_epsilon")  # fmt: skip
_DEFAULTS = {field.name: field.default for field in described_fields() if not _is_required(field)}
_OF_ALL_MIXERS = {"linear_conv_kernel_dim", "linear_attention_freq"}
_WITHOUT_EFFECT = {
    "hidden_dropout": 0.0, "attention_dropout": 0.0, "moe_router_dtype": None,
    "unpadded_vocab_size": 0, "dsa_indexer_k_norm_fp32": False,
}  # fmt: skip
"""Fields that do not affect logits -> the value that replaces any value in comparisons."""


def differences(one: ModelDescription, other: ModelDescription) -> list[str]:
    """Describe the differences between two models that affect logits."""
    first, second = _canonical(one), _canonical(other)
    pairs = {
        FLAG_OF.get(field.name, field.name): (
            getattr(first, field.name),
            getattr(second, field.name),
        )
        for field in described_fields()
    }
    return [f"{name} {a!r} would become {b!r}" for name, (a, b) in pairs.items() if a != b]


def _canonical(model: ModelDescription) -> ModelDescription:
    """Return a description that is equal for all models with the same logits."""
    has_latents = model.multi_latent_attention
    has_experts, windowed = model.has_experts, model.windowed_layers
    without_effect: set[str] = set()
    if not model.has_rotary_positions or (model.no_rope_freq and all(model.no_rope_freq)):
        without_effect |= {n for n in _DEFAULTS if n.startswith(("rotary", "rope", "use_rope"))}
    is_scaled = model.query_scale_beta and (
        not model.query_scale_without_rope or any(model.no_rope_freq or [])
    )
    reads_context = (is_scaled and not model.query_scale_interval) or model.rotary_long_factors
    is_stretched = model.position_embedding_type == "yarn" or has_latents
    if not is_stretched or model.rotary_scaling_factor == 1.0:
        without_effect |= set(_YARN) - ({_CONTEXT} if reads_context else set())
    if not is_scaled:
        without_effect |= {name for name in _DEFAULTS if name.startswith("query_scale")}
    if not model.use_rope_scaling:
        without_effect.add("rope_scaling_factor")
    if model.add_bias_linear:
        without_effect.add("add_qkv_bias")  # add_bias_linear includes these biases
    if model.num_moe_experts is None:
        without_effect |= {name for name in _DEFAULTS if name.startswith("moe_")}
    mixers = {kind.recurrence or kind.mixer for kind in model.layer_kinds}
    for of_sizes, prefix in (({GATED_DELTA_NET, KIMI}, "linear_"), ({MAMBA}, "mamba_"),
                             ({SPARSE_ATTENTION}, "dsa_")):  # fmt: skip
        if not mixers & of_sizes:
            without_effect |= {n for n in _DEFAULTS if n.startswith(prefix)} - _OF_ALL_MIXERS
    if not mixers & {GATED_DELTA_NET, KIMI, MAMBA, SHORT_CONV, SPARSE_ATTENTION}:
        without_effect |= {"experimental_attention_variant", *_OF_ALL_MIXERS}
    if model.position_embedding_type != "mrope":
        without_effect |= {"mrope_section", "mrope_interleaved"}
    without_effect |= _of_other_encoders(model)
    if model.architecture != "bert":
        without_effect.add("bert_binary_head")
    if model.moe_router_topk_scaling_factor == 1.0:
        without_effect.add("moe_router_topk_scaling_factor")
    without_effect |= (
        {
            "kv_channels",
            "v_channels",
            "group_query_attention",
            "num_query_groups",
            "rotary_interleaved",
        }
        if has_latents
        else {*_OF_LATENTS, "rope_interleave"}
    )
    plain: dict[str, Any] = {name: _DEFAULTS[name] for name in without_effect} | _WITHOUT_EFFECT
    local = model.local_scale_of_scores
    model = replace(model, softmax_scale=model.scale_of_scores, softmax_scale_local=local)
    if has_latents:
        epsilon = model.latent_norm_epsilon or model.layernorm_epsilon
        model = replace(model, latent_norm_epsilon=epsilon)
    else:
        model = replace(
            model,
            kv_channels=model.head_dim,
            v_channels=model.value_dim,
            group_query_attention=False,
            num_query_groups=model.num_key_value_heads,
        )
    if model.num_moe_experts is not None:
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
        model = replace(model, dsa_indexer_k_norm_epsilon=model.layernorm_epsilon)
    if mixers & {GATED_DELTA_NET, KIMI}:
        epsilon = model.linear_norm_epsilon or model.layernorm_epsilon
        model = replace(model, linear_norm_epsilon=epsilon)
    if MAMBA in mixers:
        model = replace(model, mamba_num_heads=model.mamba_heads)
    window, chunk = model.window_size, model.attention_chunk_size
    is_local = window is not None or chunk is not None
    return replace(
        replace(model, **plain),
        moe_layer_freq=[int(has_some) for has_some in has_experts],
        window_size=None if window is None else (window[0], window[1]),
        window_attn_skip_freq=[int(is_local and has_one) for has_one in windowed],
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
