"""What a family of models has to say about itself."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from megatron.core.transformer.config.block import BlockConfig
from megatron.core.transformer.config.experts import ExpertConfig
from megatron.core.transformer.yarn import yarn_softmax_scale
from megatron.hugging_face.config_fields import YARN, ConfigFields
from megatron.hugging_face.weight_map import Geometry, WeightRule

Settings = Mapping[str, Any]
"""Settings by the names of their flags (`num_layers`, `rotary_base`, ...)."""


@dataclass(frozen=True)
class Family:
    """One kind of model of Transformers.

    `settings` and `fields` are inverse: a model can be exported as this family if its settings
    come back unchanged.
    """

    model_type: str
    architecture: str
    """Class named in the config for causal language modelling."""
    settings: Callable[[ConfigFields], dict[str, Any]]
    """From the fields of `config.json`; every field is taken or refused."""
    fields: Callable[[Settings], dict[str, Any]]
    """From settings to the fields of `config.json`."""
    rules: Callable[[Settings], list[WeightRule]]
    prefixes: tuple[str, ...] = ("",)
    """What may be before all names in the files, written first to last."""
    without_meaning: tuple[str, ...] = ()
    """Patterns of tensors that older files hold besides weights."""
    left_out: Mapping[str, str] = field(default_factory=dict)
    """Patterns of weights that are not read -> what they are; `{num_layers}` is their number."""


PLAIN: dict[str, Any] = {
    "position_embedding_type": "learned_absolute",
    "rotary_base": 10000,
    "rotary_percent": 1.0,
    "rotary_interleaved": False,
    "rotary_seq_len_interpolation_factor": None,
    "use_rope_scaling": False,
    "rope_scaling_factor": 8.0,
    "no_rope_freq": None,
    "rotary_base_local": None,
    "normalization": "LayerNorm",
    "norm_epsilon": 1e-5,
    "apply_layernorm_1p": False,
    "apply_residual_connection_post_layernorm": False,
    "sandwich_norm": False,
    "use_parallel_residual": False,
    "embedding_multiplier": 1.0,
    "swiglu": False,
    "geglu": False,
    "squared_relu": False,
    "quick_geglu": False,
    "glu_linear_offset": 0.0,
    "activation_func_clamp_value": None,
    "openai_gelu": False,
    "add_bias_linear": True,
    "add_qkv_bias": False,
    "qk_layernorm": False,
    "window_size": None,
    "softmax_type": "vanilla",
    "attn_logit_softcapping": None,
    "final_logit_softcapping": None,
    "multi_latent_attention": False,
    "q_lora_rank": None,
    "kv_lora_rank": 32,
    "qk_head_dim": 128,
    "qk_pos_emb_head_dim": 64,
    "v_head_dim": 128,
    **YARN,
    "num_experts": None,
    "moe_layer_freq": 1,
    "moe_ffn_hidden_size": None,
    "moe_router_topk": 2,
    "moe_router_score_function": "softmax",
    "moe_router_pre_softmax": False,
    "moe_router_topk_scaling_factor": None,
    "moe_router_num_groups": None,
    "moe_router_group_topk": None,
    "moe_router_group_score_topk": None,
    "moe_router_enable_expert_bias": False,
    "moe_shared_expert_intermediate_size": None,
    "moe_shared_expert_gate": False,
    "moe_expert_capacity_factor": None,
    "mtp_num_layers": None,
}
"""Settings that decide what a model computes, besides its sizes, with what absence means."""

LATENT_SIZES = ("q_lora_rank", "kv_lora_rank", "qk_head_dim", "qk_pos_emb_head_dim", "v_head_dim")

SIZES = (
    "num_layers", "hidden_size", "ffn_hidden_size", "num_attention_heads", "kv_channels",
    "max_position_embeddings", "untie_embeddings_and_output_weights",
)  # fmt: skip


def groups_of(settings: Settings) -> int:
    """Return the number of key/value heads."""
    shares = settings.get("group_query_attention")
    return int(settings["num_query_groups"] if shares else settings["num_attention_heads"])


def geometry_of(settings: Settings) -> Geometry:
    """Return the numbers that rules need."""
    return Geometry(
        num_layers=settings["num_layers"],
        num_heads=settings["num_attention_heads"],
        num_groups=groups_of(settings),
        head_dim=head_dim_of(settings),
    )


def head_dim_of(settings: Settings) -> int:
    """Return the width of a head."""
    given = settings.get("kv_channels")
    return int(given or settings["hidden_size"] // settings["num_attention_heads"])


def experts_width(settings: Settings) -> int:
    """Return the width of an expert."""
    return int(settings.get("moe_ffn_hidden_size") or settings["ffn_hidden_size"])


def layers_with_experts(settings: Settings) -> list[bool]:
    """Return for every layer whether it has experts."""
    experts = ExpertConfig(
        num_moe_experts=settings.get("num_experts"),
        moe_layer_freq=settings.get("moe_layer_freq") or 1,
    )
    return experts.layers_with_experts(settings["num_layers"])


def softmax_scale_of(settings: Settings) -> float | None:
    """Return the factor on the scores; None where latent attention has its own."""
    if settings.get("multi_latent_attention"):
        return None
    given = settings.get("softmax_scale")
    if given is None and settings.get("position_embedding_type") == "yarn":
        factor, strength = (
            settings.get(n) or PLAIN[n] for n in ("rotary_scaling_factor", "mscale")
        )
        return yarn_softmax_scale(head_dim_of(settings), factor, strength)
    return given or head_dim_of(settings) ** -0.5


def windowed_layers(settings: Settings) -> list[bool]:
    """Return for every layer whether it has the window, if there is one."""
    block = BlockConfig(
        window_size=(0, 0), window_attn_skip_freq=settings.get("window_attn_skip_freq")
    )
    return [block.window_of(n + 1) is not None for n in range(settings["num_layers"])]


def differences(one: Settings, other: Settings) -> list[str]:
    """Return in words where two models of these settings would differ."""
    found = []
    both = [_meaning(settings) for settings in (one, other)]
    for name, value in both[0].items():
        if value != both[1][name]:
            found.append(f"{name} {value!r} would become {both[1][name]!r}")
    return found


def _meaning(settings: Settings) -> dict[str, Any]:
    """Return what decides the computation, without settings that have no effect."""
    meaning = {name: settings.get(name) for name in SIZES}
    has_latents = bool(settings.get("multi_latent_attention"))
    meaning["kv_channels"] = None if has_latents else head_dim_of(settings)
    meaning["key/value heads"] = None if has_latents else groups_of(settings)
    for name, plain in PLAIN.items():
        value = settings.get(name)
        meaning[name] = plain if value is None else value
    without_effect: set[str] = set()
    if meaning["position_embedding_type"] not in ("rope", "yarn"):
        without_effect |= {n for n in PLAIN if n.startswith(("rotary", "rope", "use_rope"))}
    is_stretched = meaning["position_embedding_type"] == "yarn" or has_latents
    if not is_stretched or meaning["rotary_scaling_factor"] == 1.0:
        without_effect |= set(YARN)
    if not has_latents:
        without_effect |= set(LATENT_SIZES)
    if not meaning["use_rope_scaling"]:
        meaning["rope_scaling_factor"] = PLAIN["rope_scaling_factor"]
    if meaning["add_bias_linear"]:
        meaning["add_qkv_bias"] = False  # implied
    has_experts = layers_with_experts(settings)
    if meaning["num_experts"] is None:
        without_effect |= {name for name in PLAIN if name.startswith("moe_")}
    else:
        meaning["moe_ffn_hidden_size"] = experts_width(settings)
        if all(has_experts):
            meaning["ffn_hidden_size"] = None  # of dense layers, of which there are none
        if meaning["moe_router_topk_scaling_factor"] == 1.0:
            meaning["moe_router_topk_scaling_factor"] = None
    meaning["moe_layer_freq"] = has_experts
    meaning |= {name: PLAIN[name] for name in without_effect - {"moe_layer_freq"}}
    window = settings.get("window_size")
    windowed = [window is not None and has_it for has_it in windowed_layers(settings)]
    meaning["window_size"] = None if window is None else tuple(window)
    meaning["layers with a window"] = windowed
    meaning["softmax_scale"] = softmax_scale_of(settings)
    return meaning
