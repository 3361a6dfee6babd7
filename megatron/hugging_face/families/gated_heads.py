"""Experts beside attention whose output is multiplied by gates from a projection of their own.

AFMoE (Arcee, Trinity): a gate for each channel, norms around both branches, rotation in layers with
a window alone. Laguna (Poolside): a gate for each head or channel by softplus. Step 3.5 and 3.7
(StepFun, "Step 3.5 Flash", arXiv 2602.10604): a gate for each head, activations clamped by limits
of each layer. In the last two, layers have numbers of heads, and a window its own rotary positions.
The layers that predict later tokens are left out.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from megatron.hugging_face.config_fields import ConfigFields
from megatron.hugging_face.families.deepseek import (
    LATER_TOKENS,
    experts_fields,
    judged_by_sigmoid,
    with_expert_layers,
    with_experts,
)
from megatron.hugging_face.families.experts import OF_BALANCE, mlp_kinds, with_mlp_kinds
from megatron.hugging_face.families.family import window_fields, with_blocks, with_window
from megatron.hugging_face.families.llama import GATED, LLAMA, gated_settings
from megatron.hugging_face.model_description import ModelDescription
from megatron.hugging_face.rope import FULL, SLIDING, rope_fields_by_kind, with_rope_by_kind
from megatron.hugging_face.weight_map import (
    WeightRule,
    by_layer_size,
    identity,
    joined_experts,
    query_key_value,
    renamed,
    with_others,
)

_MEGATRON, _HF = "decoder.layers.{}.", "model.layers.{}."
_HEADS, _FIRST = "num_attention_heads", "first_k_dense_replace"
_CLAMP, _EXPERT_CLAMP = "activation_func_clamp_value", "moe_activation_func_clamp_value"
_AFMOE_NAMES = {
    "num_experts": "n_routed_experts", "num_shared_experts": "n_shared_experts",
    "route_scale": "routed_scaling_factor", "num_dense_layers": _FIRST,
}  # fmt: skip
_LAGUNA_NAMES = {
    "num_experts": "num_moe_experts", "num_experts_per_tok": "moe_router_topk",
    "moe_intermediate_size": "moe_ffn_hidden_size",
    "shared_expert_intermediate_size": "moe_shared_expert_intermediate_size",
}  # fmt: skip
_STEP_NAMES = {"n_routed_experts": "num_moe_experts", "num_experts_per_tok": "moe_router_topk",
               "moe_intermediate_size": "moe_ffn_hidden_size",
               "share_expert_dim": "moe_shared_expert_intermediate_size"}  # fmt: skip
"""Field of a family -> DeepSeek's field, or the setting."""
_PUBLISHED = {
    "n_routed_experts": ("moe_num_experts", "num_local_experts"),
    "num_experts_per_tok": ("moe_top_k",), "share_expert_dim": ("share_expert_dims",),
    "num_key_value_heads": ("num_attention_groups",),
}  # fmt: skip
"""Field of Step -> its names in published configs."""
_UNGROUPED = {"n_group": 1, "topk_group": 1}
_ROTARY = {kind: {"rope_theta": 1e4, "partial_rotary_factor": 1.0} for kind in (FULL, SLIDING)}
_LAGUNA_ROTARY = {FULL: {"rope_theta": 5e5, "partial_rotary_factor": 0.5},
                  SLIDING: {"rope_theta": 1e4}}  # fmt: skip


def _rules(settings: ModelDescription, gate: str) -> list[WeightRule]:
    """Return the rules of a model, given the name of the projection to gates."""
    names = [f"{_HF}self_attn.{part}_proj.weight" for part in ("q", gate, "k", "v")]
    projections = query_key_value(_MEGATRON + "self_attention.linear_qkv.weight", *names)

    def of_one_size(model: ModelDescription) -> list[WeightRule]:
        return with_expert_layers(with_others(LLAMA.rules(model), projections), model)

    return by_layer_size(of_one_size, settings)


def _afmoe_settings(config: ConfigFields) -> ModelDescription:
    usual = config.renamed(_AFMOE_NAMES)
    period = config.take("global_attn_every_n_layers", 4)
    dense = LLAMA.settings(usual)
    dense = with_window(dense, usual, [(n + 1) % period != 0 for n in range(dense.num_layers)])
    windowed = [has_it and dense.window_size is not None for has_it in dense.windowed_layers]
    return replace(
        judged_by_sigmoid(with_experts(dense, usual), usual.with_fields(_UNGROUPED)),
        no_rope_freq=[int(not has_it) for has_it in windowed],
        qk_layernorm=True,
        attention_output_gate=True,
        sandwich_norm=True,
        embedding_multiplier=dense.hidden_size**0.5 if config.take("mup_enabled", False) else 1.0,
    )


def _afmoe_fields(settings: ModelDescription) -> dict[str, Any]:
    fields = {**LLAMA.fields(settings), **window_fields(settings), **experts_fields(settings)}
    named = {name: fields.pop(usual) for name, usual in _AFMOE_NAMES.items()}
    for name in ("n_group", "topk_group", "moe_layer_freq"):
        del fields[name]
    return {**fields, **named, "mup_enabled": settings.embedding_multiplier != 1.0}


def _afmoe_rules(settings: ModelDescription) -> list[WeightRule]:
    names = {"post_attention_layernorm": "pre_mlp_layernorm", "mlp.gate.weight":
             "mlp.router.gate.weight",
             "mlp.gate.e_score_correction_bias": "mlp.expert_bias"}  # fmt: skip
    after = {"post_self_attn_layernorm": "post_attention_layernorm", "post_mlp_layernorm":
             "post_mlp_layernorm"}  # fmt: skip
    return [
        *renamed(_rules(settings, "gate"), names),
        *(identity(f"{_MEGATRON}{a}.weight", f"{_HF}{b}.weight") for a, b in after.items()),
    ]


def _with_blocks(
    model: ModelDescription,
    heads: Sequence[int],
    local: dict[str, Any],
    limits: Sequence[dict[str, float]] = (),
) -> ModelDescription:
    """Return `model` with layers of their own sizes.

    Args:
        heads: of each layer.
        local: further settings of the attention of layers with a window.
        limits: settings of the MLP of each layer; default none.
    """
    attention = [
        {_HEADS: count} | (local if windowed else {})
        for count, windowed in zip(heads, model.windowed_layers, strict=True)
    ]
    return with_blocks(model, attention, limits or [{}] * model.num_layers)


def _heads(settings: ModelDescription) -> list[int]:
    layers = range(1, settings.num_layers + 1)
    return [settings.of_layer(layer).num_attention_heads for layer in layers]


def _gated_experts(config: ConfigFields, names: dict[str, str], factor: str) -> ModelDescription:
    """Return the settings that Laguna and Step share, before the sizes of layers.

    Args:
        factor: field of the factor on the weights of experts.
    """
    model = replace(gated_settings(config), swiglu=True, qk_layernorm=True)
    model = with_window(model, config, [False] * model.num_layers)
    scale = config.take(factor, 1.0)
    model = replace(
        model,
        group_query_attention=True,
        attention_output_gate=True,
        attention_gate_by_head=True,
        **config.take_all(names),
        moe_router_topk_scaling_factor=None if scale == 1.0 else scale,
        moe_router_score_function="sigmoid",
        moe_router_enable_expert_bias=True,
        moe_router_dtype="fp32",
    )
    return with_mlp_kinds(model, config)


def _sized_fields(settings: ModelDescription, names: dict[str, str]) -> dict[str, Any]:
    """Return the fields that Laguna and Step share."""
    fields = {**LLAMA.fields(settings), **window_fields(settings), **settings.fields(names)}
    del fields["rope_theta"], fields["rope_scaling"]
    return {
        **fields,
        **rope_fields_by_kind(settings, _ROTARY),
        "mlp_layer_types": mlp_kinds(settings),
    }


def _laguna_settings(config: ConfigFields) -> ModelDescription:
    layers = config.take("num_hidden_layers")
    mlps = config.take("mlp_layer_types", ["dense"] + ["sparse"] * (layers - 1))
    usual = config.with_fields({"mlp_layer_types": mlps})
    model = _gated_experts(usual, _LAGUNA_NAMES, "moe_routed_scaling_factor")
    by_head = config.only("gating", True, "per-head", "per-element") != "per-element"
    model = replace(model, attention_gate_activation="softplus", attention_gate_by_head=by_head)
    heads = config.take("num_attention_heads_per_layer", [model.num_attention_heads] * layers)
    is_stated = config.take("rope_parameters", None) is not None
    whole = {"partial_rotary_factor": 1.0} if is_stated else {}
    rotary = {kind: fields | whole for kind, fields in _LAGUNA_ROTARY.items()}
    model, local = with_rope_by_kind(model, config, rotary)
    return _with_blocks(model, heads, local)


def _laguna_fields(settings: ModelDescription) -> dict[str, Any]:
    return {
        **_sized_fields(settings, _LAGUNA_NAMES),
        "num_attention_heads_per_layer": _heads(settings),
        "gating": "per-head" if settings.attention_gate_by_head else "per-element",
        "moe_routed_scaling_factor": settings.moe_router_topk_scaling_factor or 1.0,
    }


def _laguna_rules(settings: ModelDescription) -> list[WeightRule]:
    names = {".gate.e_score_correction_bias": ".experts.e_score_correction_bias",
             ".shared_experts.": ".shared_expert."}  # fmt: skip
    return renamed(_rules(settings, "g"), names)


def _as_published(config: ConfigFields) -> ConfigFields:
    """Return a config of Step with the newer names of its fields, without later tokens."""
    layers = config.take("num_hidden_layers")
    later = config.one_of("num_nextn_predict_layers", "num_mtp_layers") or 0
    fields = {name: config.one_of(name, *others) for name, others in _PUBLISHED.items()}
    for name in ("layer_types", "mlp_layer_types", "swiglu_limits", "swiglu_limits_shared",
                 "rope_theta", "partial_rotary_factors"):  # fmt: skip
        value = fields[name] = config.take(name, None)
        if isinstance(value, list) and len(value) == layers + later:
            fields[name] = value[:layers]
    routed = config.take("moe_layers_enum", None)
    routed = routed.split(",") if isinstance(routed, str) else routed
    sparse = set(range(3, layers)) if routed is None else {int(n) for n in routed if str(n).strip()}
    fields["mlp_layer_types"] = fields["mlp_layer_types"] or [
        "sparse" if n in sparse else "dense" for n in range(layers)
    ]
    kinds = fields["layer_types"] = fields["layer_types"] or [FULL] * layers
    bases, percents = fields["rope_theta"] or 1e4, fields["partial_rotary_factors"]
    scaling = config.take("rope_scaling", None) or {}
    rotary = {}
    for kind in dict.fromkeys(kinds):
        at = kinds.index(kind)
        base = bases[at] if isinstance(bases, list) else bases
        rotary[kind] = {"rope_theta": base, "partial_rotary_factor": (percents or {at: 1.0})[at]}
        rotary[kind] |= scaling if kind == FULL else {}
    stated = config.take("rope_parameters", None) or {}
    is_whole = all(isinstance(stated.get(kind), dict) for kind in kinds)
    fields["rope_parameters"] = stated if is_whole else rotary
    return config.with_fields({n: value for n, value in fields.items() if value is not None})


def _step_settings(config: ConfigFields) -> ModelDescription:
    usual = _as_published(config)
    model = _gated_experts(usual, _STEP_NAMES, "moe_router_scaling_factor")
    of_windows = config.take("attention_other_setting", None) or {}
    others = of_windows.get(_HEADS, model.num_attention_heads)
    others = config.take("num_sliding_attention_heads", others)
    kinds = usual.take("layer_types")
    by_kind = {str(n): {_HEADS: others} for n, kind in enumerate(kinds) if kind == SLIDING}
    own = config.take("per_layer_config", by_kind)
    if any(set(part) - {_HEADS} for part in own.values()):
        config.only("per_layer_config")
    heads = [own.get(str(n), {}).get(_HEADS, model.num_attention_heads) for n in range(len(kinds))]
    width = config.take("query_pre_attn_scalar", model.head_dim)
    none = [None] * model.num_layers
    shared, routed = (usual.take(f"swiglu_limits{part}", none) for part in ("_shared", ""))
    limits = [
        {_CLAMP: shared[n], _EXPERT_CLAMP: has_some and (routed[n] or (shared[n] and math.inf))}
        for n, has_some in enumerate(model.has_experts)
    ]
    model, local = with_rope_by_kind(
        replace(
            model,
            layernorm_zero_centered_gamma=True,
            activation_func_clamp_after=True,
            softmax_scale=width**-0.5,
        ),
        usual,
        _ROTARY,
    )
    stated = [{name: value for name, value in limit.items() if value} for limit in limits]
    return _with_blocks(model, heads, local, stated)


def _step_fields(settings: ModelDescription) -> dict[str, Any]:
    limits = [block.settings for block in settings.blocks] or [{}] * settings.num_layers
    usual, heads = settings.num_attention_heads, _heads(settings)
    windowed = (h for h, has_one in zip(heads, settings.windowed_layers, strict=True) if has_one)
    routed = [limit.get(_EXPERT_CLAMP, 0.0) for limit in limits]
    return {
        **_sized_fields(settings, _STEP_NAMES),
        "num_sliding_attention_heads": next(windowed, usual),
        "per_layer_config": {str(n): {_HEADS: h} for n, h in enumerate(heads) if h != usual},
        "query_pre_attn_scalar": (settings.scale_of_scores or 1.0) ** -2,
        "moe_router_scaling_factor": settings.moe_router_topk_scaling_factor or 1.0,
        "swiglu_limits": [0.0 if math.isinf(limit) else limit for limit in routed],
        "swiglu_limits_shared": [limit.get(_CLAMP) or 0.0 for limit in limits],
    }


def _step_rules(settings: ModelDescription) -> list[WeightRule]:
    sparse = tuple(n for n, has_some in enumerate(settings.has_experts) if has_some)
    tensors = (f"{_HF}moe.{part}_proj.weight" for part in ("gate", "up", "down"))
    stacked = joined_experts(settings.num_moe_experts or 1, *tensors)
    names = {"mlp.gate.weight": "moe.gate.weight", "mlp.shared_experts.": "share_expert.",
             "mlp.gate.e_score_correction_bias": "moe.router_bias"}  # fmt: skip
    rules = [
        rule for rule in _rules(settings, "g") if ".experts.experts." not in rule.megatron_name
    ]
    return [*renamed(rules, names), *(replace(rule, layers=sparse) for rule in stacked)]


AFMOE = replace(
    LLAMA,
    model_type="afmoe",
    architecture="AfmoeForCausalLM",
    settings=_afmoe_settings,
    fields=_afmoe_fields,
    rules=_afmoe_rules,
    # Transformers' model ignores the last ones, which have one value in published configs.
    unused=(*OF_BALANCE, "load_balance_coeff", "use_grouped_mm", "score_func", "route_norm",
            "n_group", "topk_group", "num_expert_groups", "num_limited_groups"),
    only={"hidden_act": "silu", "attention_bias": False},
    absent={"head_dim": 128, "num_dense_layers": 1, "sliding_window": 1024,
            "num_shared_experts": 2},
)  # fmt: skip
LAGUNA = replace(
    LLAMA,
    model_type="laguna",
    architecture="LagunaForCausalLM",
    settings=_laguna_settings,
    fields=_laguna_fields,
    rules=_laguna_rules,
    only={"hidden_act": "silu", "attention_bias": False, "moe_router_logit_softcapping": 0.0,
          "moe_apply_router_weight_on_input": False},
    unused=OF_BALANCE,
    absent={"num_key_value_heads": 8, "head_dim": 128, "sliding_window": 512},
)  # fmt: skip
STEP3P5 = replace(
    LLAMA,
    model_type="step3p5",
    architecture="Step3p5ForCausalLM",
    settings=_step_settings,
    fields=_step_fields,
    rules=_step_rules,
    only={**GATED, "attention_bias": False, "use_bidirectional_attention": False, "gating": True},
    # Transformers' model ignores them, or they belong to later tokens.
    unused=(*OF_BALANCE, "mtp_layer_types", "mtp_mlp_layer_types", "zero_centered",
            "use_head_wise_attn_gate", "use_qk_norm", "use_moe_router_bias", "need_fp32_gate",
            "moe_router_activation", "norm_expert_weight", "att_impl_type", "yarn_only_types",
            "use_moe", "moe_every_n_layer", "moe_layer_offset", "max_seq_len", "sink"),
    absent={"num_key_value_heads": 8, "head_dim": 128},
    left_out=LATER_TOKENS,
)  # fmt: skip
FAMILIES = (AFMOE, LAGUNA, STEP3P5)
