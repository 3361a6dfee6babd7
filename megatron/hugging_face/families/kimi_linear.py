"""Kimi Linear: Kimi Delta Attention in most layers, latent attention without positions in others.

Kimi Team, "Kimi Linear: An Expressive, Efficient Attention Architecture", section 4, arXiv
2510.26692. It has the experts of DeepSeek-V3, and dense first layers. Ling 3 (`bailing_hybrid`)
projects decays and gates without latents, bounds decays, and its latent attention rotates and has a
gate for each head. The latent attention of GLM-5.3 Flash (`glm5_next`) has an indexer that chooses
pools of keys; its branches read and write parallel residual streams.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from megatron.core.foundation.errors import ConfigError
from megatron.core.utils import best_divisor
from megatron.hugging_face.config_fields import ConfigFields
from megatron.hugging_face.families.deepseek import (
    FOLLOWING,
    LATER_TOKENS,
    indexer_rules,
    judged_by_sigmoid,
    latent_fields,
    latent_rules,
    latent_settings,
    listed_experts_fields,
    with_expert_layers,
    with_listed_experts,
)
from megatron.hugging_face.families.experts import OF_BALANCE
from megatron.hugging_face.families.family import Family
from megatron.hugging_face.families.llama import LLAMA
from megatron.hugging_face.model_description import ModelDescription
from megatron.hugging_face.weight_map import (
    WeightRule,
    by_block,
    identity,
    renamed,
    with_others,
)

_MEGATRON, _HF = "decoder.layers.{}.", "model.layers.{}."
_BLOCK = "block_sparse_moe"
_KINDS = ("full_attention", "linear_attention")
_USUAL = {
    "model_max_length": "max_position_embeddings",
    "num_experts": "n_routed_experts",
    "num_experts_per_token": "num_experts_per_tok",
    "num_shared_experts": "n_shared_experts",
    "num_expert_group": "n_group",
    "moe_renormalize": "norm_topk_prob",
}
"""Field of this family -> DeepSeek's name of the field."""
_OLDER_SIZES = {"head_dim": "linear_head_dim", "num_heads": "linear_num_heads",
                "short_conv_kernel_size": "linear_conv_kernel_dim"}  # fmt: skip
"""Name of a size in `linear_attn_config` -> its newer name."""
_LING_WEIGHTS = {
    "model.embed_tokens.": "model.word_embeddings.",
    ".self_attn.": ".attention.",
    ".o_proj.": ".dense.",
    ".gate.e_score_correction_bias": ".gate.expert_bias",
}
_GLM_NEXT = {
    "index_head_dim": "dsa_indexer_head_dim", "index_n_heads": "dsa_indexer_n_heads",
    "index_topk": "dsa_indexer_topk", "index_kpool": "dsa_indexer_block_size",
    "hc_mult": "mhc_num_residual_streams", "hc_eps": "mhc_epsilon",
    "hc_sinkhorn_iters": "mhc_sinkhorn_iterations", "swiglu_limit": "activation_func_clamp_value",
}  # fmt: skip
"""Field of GLM-5.3 -> setting."""
_WITH_UNITS = (2, 1)
"""Hugging Face's `A_log` is [1, 1, n, 1]."""


def _usual(config: ConfigFields) -> ConfigFields:
    """Return a config with DeepSeek's names; Transformers reads both names."""
    named = {name: usual for name, usual in _USUAL.items() if config.stated(name) is not None}
    return config.renamed(named)


def _settings(config: ConfigFields) -> ModelDescription:
    older = dict(config.take("linear_attn_config", {}))
    usual = _usual(config)
    model = judged_by_sigmoid(with_listed_experts(latent_settings(usual), usual), usual)
    sizes = {
        name: config.one_of((f"linear_attn_config.{old}", older.get(old)), name) or default
        for (old, name), default in zip(_OLDER_SIZES.items(), (128, 32, 4), strict=True)
    }
    heads, width = sizes["linear_num_heads"], sizes["linear_head_dim"]
    if width % heads:
        raise ConfigError(
            f"{config.source}: linear_head_dim {width} and linear_num_heads {heads}.",
            rule="the latents of decays and gates are as wide as a head and are split over heads",
            flags=["--load-hf"],
            fix=f"use a model whose number of heads divides {width}, for example"
            f" {best_divisor(width, heads)}",
        )
    return replace(
        model,
        no_rope_freq=[1] * model.num_layers,
        experimental_attention_variant="kda",
        linear_attention_freq=_recurrent_layers(config, older, model.num_layers),
        linear_conv_kernel_dim=sizes["linear_conv_kernel_dim"],
        linear_key_head_dim=width,
        linear_value_head_dim=width,
        linear_num_key_heads=heads,
        linear_num_value_heads=heads,
    )


def _recurrent_layers(config: ConfigFields, older: dict[str, Any], count: int) -> list[int]:
    """Return 1 for each layer with Kimi Delta Attention, else 0."""
    kinds = config.take("layer_types", None)
    if kinds is not None:
        if set(kinds) - set(_KINDS):
            config.only("layer_types", *_KINDS)
        return [int(kind == _KINDS[1]) for kind in kinds]
    attending = older.get("full_attn_layers")  # counted from 1
    if attending is None:
        attending = range(5, count + 1, 4)
    return [int(number not in attending) for number in range(1, count + 1)]


def _fields(settings: ModelDescription) -> dict[str, Any]:
    fields = {**latent_fields(settings), **listed_experts_fields(settings)}
    del fields["rope_theta"], fields["rope_scaling"]
    for name, usual in _USUAL.items():
        fields[name] = fields.pop(usual, True)
    return {
        **fields,
        **_recurrent_fields(settings),
    }


def _recurrent_fields(settings: ModelDescription) -> dict[str, Any]:
    return {
        "layer_types": [_KINDS[kind.is_recurrent] for kind in settings.layer_kinds],
        "linear_head_dim": settings.linear_key_head_dim,
        "linear_num_heads": settings.linear_num_key_heads,
        "linear_conv_kernel_dim": settings.linear_conv_kernel_dim,
    }


def _ling_settings(config: ConfigFields) -> ModelDescription:
    config.only("q_lora_rank")
    usual = _usual(config).with_fields({"q_lora_rank": None})
    model = judged_by_sigmoid(with_listed_experts(latent_settings(usual), usual), usual)
    heads = config.take("linear_num_heads", model.num_attention_heads)
    # In files that Transformers writes, `head_dim` is the width of latent attention.
    width = config.take("linear_head_dim", config.take("head_dim", 128))
    taps = config.take("linear_conv_kernel_dim", config.take("short_conv_kernel_size", 4))
    period, kinds = config.take("layer_group_size", 6), config.take("layer_types", None)
    if kinds is None:
        kinds = [_KINDS[(n + 1) % period != 0] for n in range(model.num_layers)]
    elif set(kinds) - set(_KINDS):
        config.only("layer_types", *_KINDS)
    bound = config.take("kda_lower_bound", -5.0)
    return replace(
        model,
        attention_output_gate=True,
        experimental_attention_variant="kda",
        linear_attention_freq=[int(kind == _KINDS[1]) for kind in kinds],
        linear_conv_kernel_dim=taps,
        linear_key_head_dim=width,
        linear_value_head_dim=width,
        linear_num_key_heads=heads,
        linear_num_value_heads=heads,
        linear_full_rank_gates=True,
        linear_decay_bound=bound if config.take("kda_safe_gate", True) else None,
    )


def _ling_fields(settings: ModelDescription) -> dict[str, Any]:
    fields = {**latent_fields(settings), **listed_experts_fields(settings)}
    for name, usual in _USUAL.items():
        fields[name] = fields.pop(usual, True)
    return {
        **fields,
        **_recurrent_fields(settings),
        "head_dim": settings.linear_key_head_dim,
        "kda_safe_gate": settings.linear_decay_bound is not None,
        "kda_lower_bound": settings.linear_decay_bound or -5.0,
    }


def _ling_rules(settings: ModelDescription) -> list[WeightRule]:
    rules = [r for r in LLAMA.rules(settings) if ".self_attention." not in r.megatron_name]
    rules = with_expert_layers([*rules, *_mixer_rules(settings)], settings)
    return renamed(rules, _LING_WEIGHTS)


def _rules(settings: ModelDescription) -> list[WeightRule]:
    others = [
        rule
        for rule in renamed(LLAMA.rules(settings), {".mlp.": f".{_BLOCK}."})
        if ".self_attention." not in rule.megatron_name
    ]
    dense = [*others, *_mixer_rules(settings)]
    return with_expert_layers(dense, settings, _BLOCK, ("w1", "w3", "w2"))


def _mixer_rules(settings: ModelDescription) -> list[WeightRule]:
    recurrent = settings.layers_where(lambda kind: kind.is_recurrent)
    attending = settings.layers_where(lambda kind: kind.attends)
    return [
        *(replace(rule, layers=attending) for rule in latent_rules(settings)),
        *(replace(rule, layers=recurrent) for rule in _recurrent_rules(settings)),
    ]


def _recurrent_rules(settings: ModelDescription) -> list[WeightRule]:
    """Return the rules of Kimi Delta Attention, whose rows Megatron orders by head."""
    here, there = _MEGATRON + "self_attention.", _HF + "self_attn."
    heads, width = settings.linear_num_key_heads, settings.linear_key_head_dim
    rows = dict.fromkeys(("q_proj", "k_proj", "v_proj"), heads * width) | {"b_proj": heads}
    same = {"dt_bias": "dt_bias", "out_norm.weight": "o_norm.weight",
            "out_proj.weight": "o_proj.weight"}  # fmt: skip
    if settings.linear_full_rank_gates:
        rows |= {"f_proj": heads * width, "g_proj": heads * width}
    else:
        rows |= {"f_a_proj": width, "g_a_proj": width}
        same |= {"decay_up_weight": "f_b_proj.weight", "gate_up_weight": "g_b_proj.weight"}
    return [
        identity(here + "in_proj.layer_norm_weight", _HF + "input_layernorm.weight"),
        by_block(
            here + "in_proj.weight",
            heads,
            {f"{there}{name}.weight": (count,) for name, count in rows.items()},
        ),
        by_block(
            here + "conv1d.weight",
            heads,
            {f"{there}{part}_conv1d.weight": (heads * width,) for part in "qkv"},
        ),
        replace(
            identity(here + "A_log", there + "A_log"),
            unit_dims=(0, 0) if settings.linear_full_rank_gates else _WITH_UNITS,
        ),
        *(identity(here + mine, there + theirs) for mine, theirs in same.items()),
    ]


def _glm_next_settings(config: ConfigFields) -> ModelDescription:
    count, older = config.take("num_hidden_layers"), config.take("linear_attn_config", {})
    kinds = config.take("layer_types", [_KINDS[n % 4 != 3] for n in range(count)])
    if set(kinds) - {*_KINDS, "indexed_attention"}:
        config.only("layer_types", *_KINDS, "indexed_attention")
    known = {
        name: older.get(old, config.take(name, default))
        for (old, name), default in zip(_OLDER_SIZES.items(), (128, 64, 4), strict=True)
    }
    known |= {"layer_types": [_KINDS[kind == _KINDS[1]] for kind in kinds],
              "first_k_dense_replace": min(3, count)}  # fmt: skip
    model = _settings(config.with_fields(known))
    choosing = config.take("indexer_types", config.take("index_topk_pattern", ["full"] * count))
    layers = [*zip(kinds, model.has_experts, choosing, strict=True)]
    if any(choice in ("shared", "S") and kind != _KINDS[1] for kind, _, choice in layers):
        config.only("indexer_types", ["full"] * count)
        config.only("index_topk_pattern", "F" * count)
    bound = (
        None if config.is_null("linear_lower_bound") else config.take("linear_lower_bound", -5.0)
    )
    bound = older.get("gate_lower_bound", bound)
    if bound is None and older.get("safe_gate", bool(older)):
        bound = -5.0
    return replace(
        model,
        latent_norm_epsilon=model.layernorm_epsilon,
        experimental_attention_variant=None,
        linear_attention_freq=None,
        hybrid_layer_pattern="".join(f"[{'DK'[k == _KINDS[1]]}{'-E'[e]}]" for k, e, _ in layers),
        dsa_indexer_k_norm_epsilon=1e-6,
        linear_decay_bound=bound,
        enable_mhc_connections=True,
        **config.take_all(_GLM_NEXT),
    )


def _glm_next_fields(settings: ModelDescription) -> dict[str, Any]:
    fields = {**latent_fields(settings), **listed_experts_fields(settings)}
    del fields["rope_theta"], fields["rope_scaling"]
    return {
        **fields,
        **_recurrent_fields(settings),
        **settings.fields(_GLM_NEXT),
        "norm_topk_prob": True,
        "linear_lower_bound": settings.linear_decay_bound,
    }


def _glm_next_rules(settings: ModelDescription) -> list[WeightRule]:
    rules = [r for r in LLAMA.rules(settings) if ".self_attention." not in r.megatron_name]
    rules += [*_mixer_rules(settings), *indexer_rules(settings)]
    logs = [replace(rule, unit_dims=(0, 0)) for rule in rules if "A_log" in rule.megatron_name]
    rules = with_expert_layers(with_others(rules, *logs), settings)
    for here, there in (("self_attention", "attn"), ("mlp", "ffn")):
        names = {"weight": "fn", "bias": "base", "alpha": "scale"}
        here = f"{_MEGATRON}{here}_hyper_connection."
        rules += [identity(here + a, f"{_HF}hc_{there}_{b}") for a, b in names.items()]
    return renamed(rules, {"model.": "model.language_model."})


KIMI_LINEAR = Family(
    "kimi_linear",
    "KimiLinearForCausalLM",
    _settings,
    _fields,
    _rules,
    only={**LLAMA.only, "mla_use_nope": True, "moe_router_activation_func": "sigmoid"},
    unused=(*FOLLOWING, "num_nextn_predict_layers", "use_grouped_topk"),
    absent={"num_key_value_heads": 32, "routed_scaling_factor": 2.446, "first_k_dense_replace": 1},
    without_meaning=LLAMA.without_meaning,
    # In published files a dense MLP is named `mlp`; files that Transformers writes use `_BLOCK`.
    other_names={r"(model\.layers\.\d+)\.mlp\.": rf"\1.{_BLOCK}."},
    left_out=LATER_TOKENS,
)
BAILING_HYBRID = Family(
    "bailing_hybrid",
    "BailingHybridForCausalLM",
    _ling_settings,
    _ling_fields,
    _ling_rules,
    only={**LLAMA.only, "rope_interleave": True},
    unused=("qk_head_dim", "num_nextn_predict_layers", "mtp_loss_scaling_factor"),
    absent={"num_key_value_heads": 32, "routed_scaling_factor": 2.5, "first_k_dense_replace": 2,
            "n_group": 8, "topk_group": 4, "rope_theta": 6_000_000.0},
    without_meaning=LLAMA.without_meaning,
    left_out=LATER_TOKENS,
)  # fmt: skip
GLM5_NEXT = Family(
    "glm5_next",
    "Glm5NextForConditionalGeneration",
    _glm_next_settings,
    _glm_next_fields,
    _glm_next_rules,
    only={"hidden_act": "silu", "attention_bias": False, "index_kpool_always_select_tail": True,
          "index_topk_freq": 1},
    unused=(*FOLLOWING, *OF_BALANCE, "index_skip_topk_offset", "num_nextn_predict_layers"),
    absent={"num_key_value_heads": 64, "q_lora_rank": 1536, "qk_rope_head_dim": 0,
            "routed_scaling_factor": 2.5, "index_head_dim": 128, "index_n_heads": 32,
            "index_topk": 2048, "index_kpool": 16, "hc_mult": 4, "hc_eps": 1e-6,
            "hc_sinkhorn_iters": 20, "swiglu_limit": 10.0},
    without_meaning=(r".*shared_head\..*",),
    around={"vision_config": {
        "depth": 0, "hidden_size": 4, "num_heads": 1, "intermediate_size": 4,
        "projection_intermediate_size": 4, "out_hidden_size": 4}},
    other_names={r"^model\.(layers|embed_tokens|norm)\.": r"model.language_model.\1."},
    left_out={
        r"model\.language_model\.layers\.{num_layers}\..*": "the layer that predicts later tokens",
        r"model\.visual\..*": "the encoder of images",
    },
)  # fmt: skip
