"""DeepSeek V2 to V3.2: latent attention, routed experts and a shared expert, dense first layers.

DeepSeek-AI, "DeepSeek-V2", sections 2.1 and 2.2, arXiv 2405.04434; "DeepSeek-V3 Technical Report",
section 2.1, arXiv 2412.19437; "DeepSeek-V3.2", section 2.1, arXiv 2512.02556, whose indexer chooses
the keys of attention. Kimi K2 (arXiv 2507.20534) is a V3, also as the text of K2.5 to 2.7, whose
encoder of images is left out. The multi-token prediction layers of V3 are left out.
"""

from __future__ import annotations

from dataclasses import replace
from itertools import product
from typing import Any

from megatron.hugging_face.config_fields import ConfigFields
from megatron.hugging_face.families.experts import (
    by_mlp,
    expert_rules,
    mlp_kinds,
    with_mlp_kinds,
)
from megatron.hugging_face.families.family import Family
from megatron.hugging_face.families.llama import LLAMA, gated_settings
from megatron.hugging_face.model_description import ModelDescription
from megatron.hugging_face.rope import rope_fields, with_rope
from megatron.hugging_face.weight_map import WeightRule, concat, identity

_MEGATRON, _HF = "decoder.layers.{}.", "model.layers.{}."
_OF_TRAINING = ("aux_loss_alpha", "seq_aux", "ep_size", "output_router_logits")
FOLLOWING = ("head_dim", "qk_head_dim")
"""Widths that Transformers writes and that follow from other fields."""
_LATENT_SIZES = {
    "q_lora_rank": "q_lora_rank", "kv_lora_rank": "kv_lora_rank", "v_head_dim": "v_head_dim",
    "qk_nope_head_dim": "qk_head_dim", "qk_rope_head_dim": "qk_pos_emb_head_dim",
}  # fmt: skip
"""Field -> setting."""
_INDEXERS = ("full", "shared")
SCALES = {"scale": "s", "bias": "b"}
"""Name of a number of `scalable_softmax` -> Mistral's name."""
_LATENT_EPSILON = 1e-6
"""Epsilon of the norms of latents; the config's epsilon is for the other norms."""


def latent_settings(config: ConfigFields) -> ModelDescription:
    """Return the settings of a dense model with latent attention."""
    settings = gated_settings(config)
    config.only("num_key_value_heads", settings.num_attention_heads)
    return replace(
        with_rope(settings, config),
        kv_channels=None,
        group_query_attention=False,
        swiglu=True,
        # Latent attention has its own YaRN settings, with the position type "rope".
        position_embedding_type="rope",
        multi_latent_attention=True,
        qk_layernorm=True,
        **config.take_all(_LATENT_SIZES, q_lora_rank=None),
        latent_norm_epsilon=_LATENT_EPSILON,
    )


def with_experts(settings: ModelDescription, config: ConfigFields) -> ModelDescription:
    """Return `settings` with the experts of the config, after dense layers at the beginning."""
    for name in _OF_TRAINING:
        config.take(name, None)
    config.only("moe_layer_freq", 1)
    layers, dense = settings.num_layers, config.take("first_k_dense_replace", 0)
    width = config.take("moe_intermediate_size")
    factor = config.take("routed_scaling_factor", 1.0)
    return replace(
        settings,
        num_moe_experts=config.take("n_routed_experts"),
        moe_layer_freq=[int(n >= dense) for n in range(layers)] if dense else 1,
        moe_ffn_hidden_size=width,
        moe_shared_expert_intermediate_size=width * config.take("n_shared_experts"),
        moe_router_topk=config.take("num_experts_per_tok"),
        moe_router_topk_scaling_factor=None if factor == 1.0 else factor,
        moe_router_dtype="fp32",
    )


def with_listed_experts(
    settings: ModelDescription, config: ConfigFields, num_dense: int | None = None
) -> ModelDescription:
    """Return `settings` with experts in the layers that `mlp_layer_types` lists.

    Args:
        num_dense: number of dense first layers if there is no list, for families that ignore
            `first_k_dense_replace`.
    """
    view = config if num_dense is None else config.with_fields({"first_k_dense_replace": num_dense})
    settings = with_mlp_kinds(with_experts(settings, view), config)
    if num_dense is not None:
        config.only("first_k_dense_replace", settings.has_experts.count(False))
    return settings


def judged_by_sigmoid(settings: ModelDescription, config: ConfigFields) -> ModelDescription:
    """Return `settings` with DeepSeek-V3's router: sigmoid scores and a bias for each expert."""
    config.only("norm_topk_prob", True)
    return replace(
        _with_groups(settings, config, judges=2),
        moe_router_score_function="sigmoid",
        moe_router_enable_expert_bias=True,
    )


def _with_groups(settings: ModelDescription, config: ConfigFields, judges: int) -> ModelDescription:
    """Return `settings` with group-limited routing, unless all groups are kept."""
    groups, kept = config.take("n_group", 1), config.take("topk_group", 1)
    if groups == kept:
        return settings
    return replace(
        settings,
        moe_router_num_groups=groups,
        moe_router_group_topk=kept,
        moe_router_group_score_topk=judges,
    )


def latent_fields(settings: ModelDescription) -> dict[str, Any]:
    """Return the fields of a dense model with latent attention."""
    fields = LLAMA.fields(settings)
    del fields["head_dim"]
    return {
        **fields,
        **rope_fields(settings),
        **settings.fields(_LATENT_SIZES),
        "num_key_value_heads": settings.num_attention_heads,
    }


def experts_fields(settings: ModelDescription) -> dict[str, Any]:
    """Return the fields of routed experts and a shared expert."""
    width = settings.experts_width
    return {
        "n_routed_experts": settings.num_moe_experts or 1,
        "n_shared_experts": (settings.moe_shared_expert_intermediate_size or 0) // width,
        "first_k_dense_replace": settings.has_experts.count(False),
        "moe_layer_freq": 1,
        "moe_intermediate_size": width,
        "num_experts_per_tok": settings.moe_router_topk,
        "routed_scaling_factor": settings.moe_router_topk_scaling_factor or 1.0,
        "n_group": settings.moe_router_num_groups or 1,
        "topk_group": settings.moe_router_group_topk or 1,
    }


def listed_experts_fields(settings: ModelDescription) -> dict[str, Any]:
    """Return the fields of experts in a family whose configs list the layers."""
    fields = experts_fields(settings)
    del fields["first_k_dense_replace"], fields["moe_layer_freq"]
    return {**fields, "mlp_layer_types": mlp_kinds(settings)}


def _v2_settings(config: ConfigFields) -> ModelDescription:
    is_limited = config.only("topk_method", "greedy", "group_limited_greedy")
    settings = with_experts(latent_settings(config), config)
    limited = _with_groups(settings, config, judges=1)
    return replace(
        limited if is_limited == "group_limited_greedy" else settings,
        moe_router_pre_softmax=True,
    )


def _v2_fields(settings: ModelDescription) -> dict[str, Any]:
    limited = settings.moe_router_num_groups
    return {
        **latent_fields(settings),
        **experts_fields(settings),
        "topk_method": "group_limited_greedy" if limited else "greedy",
    }


def _v3_settings(config: ConfigFields) -> ModelDescription:
    return replace(
        judged_by_sigmoid(with_experts(latent_settings(config), config), config),
        rope_interleave=config.take("rope_interleave", True),
    )


def _v3_fields(settings: ModelDescription) -> dict[str, Any]:
    return {
        **latent_fields(settings),
        **experts_fields(settings),
        "norm_topk_prob": True,
        "rope_interleave": settings.rope_interleave,
        "num_nextn_predict_layers": 0,
    }


def v32_settings(config: ConfigFields) -> ModelDescription:
    """Return the settings of a model whose attention has an indexer."""
    layers = config.take("num_hidden_layers")
    dense = min(config.take("first_k_dense_replace", 3), layers)
    known = {"num_hidden_layers": layers, "first_k_dense_replace": dense, "rope_interleave": True}
    settings = _v3_settings(config.with_fields(known))  # checks the type of num_hidden_layers
    config.only("layer_types", ["indexed_attention"] * layers)
    config.only("mlp_layer_types", ["dense"] * dense + ["sparse"] * (layers - dense))
    return replace(
        settings,
        experimental_attention_variant="dsa",
        dsa_indexer_head_dim=config.take("index_head_dim"),
        dsa_indexer_n_heads=config.take("index_n_heads"),
        dsa_indexer_topk=config.take("index_topk"),
        dsa_indexer_k_norm_epsilon=_LATENT_EPSILON,
    )


def v32_fields(settings: ModelDescription) -> dict[str, Any]:
    """Return the fields of a model whose attention has an indexer."""
    fields = _v3_fields(settings)
    del fields["rope_interleave"]  # the class has no such field: channels always interleave
    return {
        **fields,
        "index_head_dim": settings.dsa_indexer_head_dim or 1,
        "index_n_heads": settings.dsa_indexer_n_heads or 1,
        "index_topk": settings.dsa_indexer_topk or 1,
    }


def with_shared_keys(
    settings: ModelDescription, config: ConfigFields, *, freq: int = 1
) -> ModelDescription:
    """Return `settings` with the layers that share the keys of an earlier layer.

    Args:
        freq: its default.
    """
    pattern = config.take("index_topk_pattern", None)
    freq = max(config.take("index_topk_freq", freq), 1)
    offset = config.take("index_skip_topk_offset", 2)
    if isinstance(pattern, str):
        names = dict(zip("FS", _INDEXERS, strict=True))
        pattern = [names.get(letter, letter) for letter in pattern]
    stated = replace(settings, dsa_indexer_topk_freq=freq, dsa_indexer_skip_topk_offset=offset)
    kinds = config.take("indexer_types", pattern) or indexer_kinds(stated)
    layers = range(1, settings.num_layers + 1)
    for freq, offset in product(layers, layers):
        made = replace(settings, dsa_indexer_topk_freq=freq, dsa_indexer_skip_topk_offset=offset)
        if indexer_kinds(made) == list(kinds):
            return made if freq > 1 else settings
    for name in ("index_topk_pattern", "indexer_types"):
        config.only(name, indexer_kinds(stated))
    return stated


def indexer_kinds(settings: ModelDescription) -> list[str]:
    """Return "full" for each layer with an indexer, and "shared" for the others."""
    return [_INDEXERS[settings.shares_keys(n + 1)] for n in range(settings.num_layers)]


def _glm_dsa_settings(config: ConfigFields) -> ModelDescription:
    settings = with_shared_keys(v32_settings(config), config)
    return replace(settings, dsa_indexer_rope_interleaved=True)


def v32_rules(settings: ModelDescription) -> list[WeightRule]:
    """Return the rules of a model whose attention has an indexer in some layers."""
    return [*_rules(settings), *indexer_rules(settings)]


def indexer_rules(settings: ModelDescription) -> list[WeightRule]:
    """Return the rules of indexers."""
    megatron_prefix = _MEGATRON + "self_attention.core_attention.indexer."
    hf_prefix = _HF + "self_attn.indexer."
    pairs = {
        "linear_wq_b.weight": "wq_b.weight",
        "linear_wk.weight": "wk.weight",
        "k_norm.weight": "k_norm.weight",
        "k_norm.bias": "k_norm.bias",
        "linear_weights_proj.weight": "weights_proj.weight",
    }
    if settings.dsa_indexer_block_size > 1:
        pairs |= {
            "pool_gate.weight": "index_kpool_compress_gate",
            "pool_gate.position_bias": "index_kpool_compress_ape",
        }
    if settings.q_lora_rank is None:
        pairs |= {f"input_norm.{part}": f"q_input_norm.{part}" for part in ("weight", "bias")}
    if settings.scalable_softmax:
        pairs |= {f"query_scale.{a}": f"ssmax_scaling.{b}" for a, b in SCALES.items()}
    sparse = settings.layers_where(lambda kind: kind.is_sparse)
    owners = tuple(n for n in sparse if not settings.shares_keys(n + 1))
    indexers = (identity(megatron_prefix + a, hf_prefix + b) for a, b in pairs.items())
    return [replace(rule, layers=owners) for rule in indexers]


def latent_rules(settings: ModelDescription) -> list[WeightRule]:
    """Return the rules of latent attention and the norm before it."""
    megatron_prefix, hf_prefix = _MEGATRON + "self_attention.", _HF + "self_attn."
    pairs = {
        "linear_kv_down_proj": "kv_a_proj_with_mqa",
        "kv_layernorm": "kv_a_layernorm",
        "linear_kv_up_proj": "kv_b_proj",
        "linear_proj": "o_proj",
    }
    if settings.q_lora_rank is None:
        pairs |= {"linear_q_proj": "q_proj"}
    else:
        pairs |= {"linear_q_down_proj": "q_a_proj", "q_layernorm": "q_a_layernorm",
                  "linear_q_up_proj": "q_b_proj"}  # fmt: skip
    if settings.attention_output_gate:
        pairs |= {"linear_gate_proj": "g_proj"}
    norm = identity(_MEGATRON + "input_layernorm.weight", _HF + "input_layernorm.weight")
    return [
        norm,
        *(
            identity(f"{megatron_prefix}{a}.weight", f"{hf_prefix}{b}.weight")
            for a, b in pairs.items()
        ),
    ]


def dense_rules(settings: ModelDescription) -> list[WeightRule]:
    """Return the rules of a dense model with latent attention."""
    others = [
        rule for rule in LLAMA.rules(settings) if ".self_attention." not in rule.megatron_name
    ]
    return [*others, *latent_rules(settings)]


def _rules(settings: ModelDescription) -> list[WeightRule]:
    return with_expert_layers(dense_rules(settings), settings)


def with_expert_layers(
    dense: list[WeightRule],
    settings: ModelDescription,
    block: str = "mlp",
    names: tuple[str, str, str] = ("gate_proj", "up_proj", "down_proj"),
) -> list[WeightRule]:
    """Return the rules of a dense model with routed and shared experts in some layers.

    Args:
        block: Hugging Face's name of the MLP of these layers.
        names: Hugging Face's names of gate, up and down of a routed expert.
    """
    megatron_prefix, hf_prefix = _MEGATRON + "mlp.shared_experts.", f"{_HF}{block}.shared_experts."
    experts = [
        *expert_rules(settings, block, *names),
        concat(
            megatron_prefix + "linear_fc1.weight",
            hf_prefix + "gate_proj.weight",
            hf_prefix + "up_proj.weight",
        ),
        identity(megatron_prefix + "linear_fc2.weight", hf_prefix + "down_proj.weight"),
    ]
    if settings.moe_router_enable_expert_bias:
        bias = f"{_HF}{block}.gate.e_score_correction_bias"
        experts.append(identity(_MEGATRON + "mlp.router.expert_bias", bias))
    return by_mlp(dense, experts, settings)


LATER_TOKENS = {r"model\.layers\.{num_layers}\..*": "the layer that predicts later tokens"}
DEEPSEEK_V2 = replace(
    LLAMA,
    model_type="deepseek_v2",
    architecture="DeepseekV2ForCausalLM",
    settings=_v2_settings,
    fields=_v2_fields,
    rules=_rules,
    only={**LLAMA.only, "scoring_func": "softmax", "norm_topk_prob": False},
    unused=FOLLOWING,
    absent={"q_lora_rank": 1536},
)
DEEPSEEK_V3 = Family(
    "deepseek_v3",
    "DeepseekV3ForCausalLM",
    _v3_settings,
    _v3_fields,
    _rules,
    only={**LLAMA.only, "scoring_func": "sigmoid", "topk_method": "noaux_tc"},
    unused=(*FOLLOWING, "num_nextn_predict_layers"),
    absent={"num_key_value_heads": 128, "q_lora_rank": 1536, "n_group": 8, "topk_group": 4,
            "routed_scaling_factor": 2.5, "first_k_dense_replace": 3},
    without_meaning=LLAMA.without_meaning,
    left_out=LATER_TOKENS,
)  # fmt: skip
DEEPSEEK_V32 = replace(
    DEEPSEEK_V3,
    model_type="deepseek_v32",
    architecture="DeepseekV32ForCausalLM",
    settings=v32_settings,
    fields=v32_fields,
    rules=v32_rules,
)
GLM_MOE_DSA = replace(
    DEEPSEEK_V32,
    model_type="glm_moe_dsa",
    architecture="GlmMoeDsaForCausalLM",
    settings=_glm_dsa_settings,
    fields=lambda settings: {**v32_fields(settings), "indexer_types": indexer_kinds(settings)},
    absent={"num_key_value_heads": 64, "q_lora_rank": 2048, "routed_scaling_factor": 2.5},
)
