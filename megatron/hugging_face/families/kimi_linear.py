"""Kimi Linear: Kimi Delta Attention in most layers, latent attention without positions in others.

Kimi Team, "Kimi Linear: An Expressive, Efficient Attention Architecture", section 4, arXiv
2510.26692. It has the experts of DeepSeek-V3, and dense first layers. Ling 3 (`bailing_hybrid`)
projects decays and gates without latents, bounds decays, and its latent attention rotates and has a
gate for each head.
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
    judged_by_sigmoid,
    latent_fields,
    latent_rules,
    latent_settings,
    listed_experts_fields,
    with_expert_layers,
    with_listed_experts,
)
from megatron.hugging_face.families.family import Family
from megatron.hugging_face.families.llama import LLAMA
from megatron.hugging_face.model_description import ModelDescription
from megatron.hugging_face.weight_map import WeightRule, by_block, identity, renamed

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
        "layer_types": [_KINDS[kind.is_recurrent] for kind in settings.layer_kinds],
        "head_dim": settings.linear_key_head_dim,
        "linear_head_dim": settings.linear_key_head_dim,
        "linear_num_heads": settings.linear_num_key_heads,
        "linear_conv_kernel_dim": settings.linear_conv_kernel_dim,
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
