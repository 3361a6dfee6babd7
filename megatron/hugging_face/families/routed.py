"""MiniMax M2, M3 and ERNIE 4.5 with experts: a bias of each expert takes part in the choice.

MiniMax judges experts by a sigmoid; M2 norms all heads of a token together. In M3 an indexer
chooses blocks of keys for each group of query heads, and gated activations are clamped. ERNIE 4.5
judges experts by a softmax ("ERNIE 4.5 Technical Report", section 2) and has shared experts.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from megatron.hugging_face.config_fields import ConfigFields
from megatron.hugging_face.families.deepseek import with_expert_layers
from megatron.hugging_face.families.experts import (
    OF_BALANCE,
    expert_rules,
    mlp_kinds,
    with_mlp_kinds,
)
from megatron.hugging_face.families.llama import LLAMA
from megatron.hugging_face.families.relatives import ERNIE4_5
from megatron.hugging_face.model_description import ModelDescription
from megatron.hugging_face.weight_map import WeightRule, identity, renamed

_MEGATRON, _HF = "decoder.layers.{}.", "model.layers.{}."
_BIAS = _MEGATRON + "mlp.router.expert_bias"
_BLOCK = "block_sparse_moe"
_M3_KINDS = ("full_attention", "minimax_m3_sparse")
_M3_NAMES = {
    "index_n_heads": "dsa_indexer_n_heads", "index_head_dim": "dsa_indexer_head_dim",
    "index_block_size": "dsa_indexer_block_size",
    "index_local_blocks": "dsa_indexer_local_blocks",
    "swiglu_limit": "activation_func_clamp_value",
    "routed_scaling_factor": "moe_router_topk_scaling_factor",
    "shared_intermediate_size": "moe_shared_expert_intermediate_size",
}  # fmt: skip
"""Field -> setting."""
_M3_OLDER = {
    "index_n_heads": "sparse_num_index_heads", "index_head_dim": "sparse_index_dim",
    "index_block_size": "sparse_block_size", "index_topk_blocks": "sparse_topk_blocks",
    "index_local_blocks": "sparse_local_block",
}  # fmt: skip
"""Field -> its name in `sparse_attention_config`."""


def _minimax_settings(config: ConfigFields) -> ModelDescription:
    width = config.take("rotary_dim", None)
    if width is not None:
        share = {"partial_rotary_factor": width / config.take("head_dim")}
        config = config.with_fields(share)
    settings = LLAMA.settings(config)
    return replace(
        settings,
        qk_layernorm=True,
        qk_layernorm_across_heads=True,
        num_moe_experts=config.one_of("num_local_experts", "num_experts")
        or config.take("num_local_experts"),
        moe_router_topk=config.take("num_experts_per_tok"),
        moe_ffn_hidden_size=settings.ffn_hidden_size,
        moe_router_score_function="sigmoid",
        moe_router_enable_expert_bias=True,
        moe_router_dtype="fp32",
    )


def _minimax_fields(settings: ModelDescription) -> dict[str, Any]:
    return {
        **LLAMA.fields(settings),
        "partial_rotary_factor": settings.rotary_percent,
        "intermediate_size": settings.experts_width,
        "num_local_experts": settings.num_moe_experts or 1,
        "num_experts_per_tok": settings.moe_router_topk,
    }


def _minimax_rules(settings: ModelDescription) -> list[WeightRule]:
    return [
        *(rule for rule in LLAMA.rules(settings) if ".mlp." not in rule.megatron_name),
        *expert_rules(settings, _BLOCK, "w1", "w3", "w2"),
        identity(_BIAS, f"{_HF}{_BLOCK}.e_score_correction_bias"),
    ]


def _ernie_settings(config: ConfigFields) -> ModelDescription:
    settings = ERNIE4_5.settings(config)
    layers, interval = settings.num_layers, config.take("moe_layer_interval", 1)
    first, last = config.take("moe_layer_start_index", 1), config.take("moe_layer_end_index", -1)
    last = layers - 1 if last == -1 else last
    width = config.take("moe_intermediate_size")
    return replace(
        settings,
        num_moe_experts=config.one_of("moe_num_experts", "num_experts")
        or config.take("moe_num_experts"),
        moe_layer_freq=[int(first <= n <= last and (n + 1) % interval == 0) for n in range(layers)],
        moe_ffn_hidden_size=width,
        moe_shared_expert_intermediate_size=width * config.take("moe_num_shared_experts", 2)
        or None,
        moe_router_topk=config.one_of("moe_k", "num_experts_per_tok") or config.take("moe_k"),
        moe_router_enable_expert_bias=True,
        moe_router_dtype="fp32",
    )


def _ernie_fields(settings: ModelDescription) -> dict[str, Any]:
    routed = [n for n, has_some in enumerate(settings.has_experts) if has_some]
    width = settings.experts_width
    return {
        **ERNIE4_5.fields(settings),
        "moe_num_experts": settings.num_moe_experts or 1,
        "moe_layer_start_index": routed[0] if routed else settings.num_layers,
        "moe_layer_end_index": routed[-1] if routed else -1,
        "moe_layer_interval": routed[1] - routed[0] if len(routed) > 1 else 1,
        "moe_intermediate_size": width,
        "moe_num_shared_experts": (settings.moe_shared_expert_intermediate_size or 0) // width,
        "moe_k": settings.moe_router_topk,
    }


def _ernie_rules(settings: ModelDescription) -> list[WeightRule]:
    has_shared = settings.moe_shared_expert_intermediate_size
    bias = (f"{_HF}mlp.moe_statics.e_score_correction_bias",)
    return [
        replace(rule, hf_names=bias, unit_dims=(1, 0)) if rule.megatron_name == _BIAS else rule
        for rule in with_expert_layers(ERNIE4_5.rules(settings), settings)
        if has_shared or ".shared_experts." not in rule.megatron_name
    ]


def _m3_settings(config: ConfigFields) -> ModelDescription:
    older, width = config.take("sparse_attention_config", {}), config.take("intermediate_size")
    known = {name: older.get(old, config.take(name)) for name, old in _M3_OLDER.items()}
    known |= {"intermediate_size": config.take("dense_intermediate_size")}
    model = _minimax_settings(config.with_fields(known).without("rotary_dim"))
    listed = older.get("sparse_attention_freq", [0] * model.num_layers)
    kinds = config.take("layer_types", [_M3_KINDS[bool(is_sparse)] for is_sparse in listed])
    if set(kinds) - set(_M3_KINDS):
        config.only("layer_types", *_M3_KINDS)
    sizes = config.with_fields(known).take_all(_M3_NAMES)
    routed = replace(model, moe_layer_freq=config.take("moe_layer_freq", 1))
    return replace(
        with_mlp_kinds(routed, config),
        swiglu=False,
        quick_geglu=True,
        glu_linear_offset=1.0,
        layernorm_zero_centered_gamma=True,
        qk_layernorm_across_heads=False,
        experimental_attention_variant="dsa",
        linear_attention_freq=[int(kind == _M3_KINDS[1]) for kind in kinds],
        dsa_indexer_topk=known["index_topk_blocks"] * known["index_block_size"],
        dsa_indexer_scoring_relu=False,
        moe_ffn_hidden_size=width,
        **sizes,
    )


def _m3_fields(settings: ModelDescription) -> dict[str, Any]:
    return {
        **_minimax_fields(settings),
        **settings.fields(_M3_NAMES),
        "dense_intermediate_size": settings.ffn_hidden_size,
        "layer_types": [_M3_KINDS[kind.is_sparse] for kind in settings.layer_kinds],
        "mlp_layer_types": mlp_kinds(settings),
        "index_topk_blocks": (settings.dsa_indexer_topk or 0) // settings.dsa_indexer_block_size,
    }


def _m3_rules(settings: ModelDescription) -> list[WeightRule]:
    sparse = settings.layers_where(lambda kind: kind.is_sparse)
    others = settings.layers_where(lambda kind: not kind.is_sparse)
    norm = identity(_MEGATRON + "input_layernorm.weight", _HF + "input_layernorm.weight")
    here, there = _MEGATRON + "self_attention.core_attention.indexer.", _HF + "self_attn.index_"
    names = {"linear_wq_b": "q_proj", "linear_wk": "k_proj", "q_norm": "q_norm", "k_norm": "k_norm"}
    indexer = [identity(f"{here}{a}.weight", f"{there}{b}.weight") for a, b in names.items()]
    rules = [
        replace(rule, layers=others) if "linear_qkv.layer_norm" in rule.megatron_name else rule
        for rule in LLAMA.rules(settings)
    ]
    rules += [replace(rule, layers=sparse) for rule in (norm, *indexer)]
    rules = with_expert_layers(rules, settings, _BLOCK, ("w1", "w3", "w2"))
    return renamed(rules, {".gate.e_score_": ".e_score_"})


MINIMAX_M2 = replace(
    LLAMA,
    model_type="minimax_m2",
    architecture="MiniMaxM2ForCausalLM",
    settings=_minimax_settings,
    fields=_minimax_fields,
    rules=_minimax_rules,
    only={"hidden_act": "silu", "router_jitter_noise": 0.0},
    # Transformers' model ignores them: later tokens are left out, the others have one value.
    unused=(
        *OF_BALANCE, "attn_type_list", "mtp_transformer_layers", "num_mtp_modules", "use_mtp",
        "qk_norm_type", "use_qk_norm", "scoring_func", "use_routing_bias",
        "shared_intermediate_size",
    ),
    absent={"num_key_value_heads": 8, "head_dim": 128, "rope_theta": 5_000_000.0},
    left_out={r"(model\.)?mtp.*": "the layers that predict later tokens"},
)  # fmt: skip
ERNIE4_5_MOE = replace(
    ERNIE4_5,
    model_type="ernie4_5_moe",
    architecture="Ernie4_5_MoeForCausalLM",
    settings=_ernie_settings,
    fields=_ernie_fields,
    rules=_ernie_rules,
    # The smallest divisor of the weights, and fields that Transformers' model ignores.
    unused=(*OF_BALANCE, "moe_norm_min", "moe_capacity", "moe_gate", "moe_use_aux_free",
            "num_nextn_predict_layers"),
    absent={"num_key_value_heads": 4, "rope_theta": 500_000.0, "tie_word_embeddings": True},
    left_out={r"(model\.)?mtp.*": "the layers that predict later tokens"},
)  # fmt: skip
MINIMAX_M3 = replace(
    MINIMAX_M2,
    model_type="minimax_m3_vl",
    architecture="MiniMaxM3SparseForConditionalGeneration",
    settings=_m3_settings,
    fields=_m3_fields,
    rules=_m3_rules,
    only={"swiglu_alpha": 1.702},
    # Transformers applies silu whatever `hidden_act` is, and reads the rotary width elsewhere.
    unused=(*MINIMAX_M2.unused[:-1], "hidden_act", "rotary_dim", "router_jitter_noise"),
    absent={"num_key_value_heads": 4, "head_dim": 128, "rope_theta": 5_000_000.0,
            "dense_intermediate_size": 12288, "shared_intermediate_size": 3072,
            "routed_scaling_factor": 2.0, "swiglu_limit": 7.0, "index_n_heads": 4,
            "index_head_dim": 128, "index_block_size": 128, "index_topk_blocks": 16,
            "index_local_blocks": 1},
    prefixes=("language_model.",),
    around={"projector_hidden_size": 4, "vision_config": {
        "hidden_size": 4, "intermediate_size": 4, "num_hidden_layers": 0, "num_attention_heads": 1,
        "patch_size": 2, "image_size": 4}},
    left_out={
        **MINIMAX_M2.left_out,
        r"(vision_tower|multi_modal_projector|patch_merge_mlp)\..*": "the encoder of images",
    },
)  # fmt: skip
FAMILIES = (MINIMAX_M2, MINIMAX_M3, ERNIE4_5_MOE)
