"""Mixtral, Qwen 2 and Qwen 3 with experts: the attention of the dense models, an MLP per expert.

Qwen 2 also has a shared expert, whose output is multiplied by a gate. Mellum is a Qwen 3 with
windows in part of the layers, which have their own rotary base, and dense layers. Flint has sinks,
windows in the layers that rotate, sigmoid scores and a shared expert.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from megatron.hugging_face.config_fields import ConfigFields
from megatron.hugging_face.families.family import Family, window_fields, with_window
from megatron.hugging_face.families.llama import GATED, LLAMA, MISTRAL, QWEN2, QWEN3, gated_settings
from megatron.hugging_face.model_description import ModelDescription
from megatron.hugging_face.rope import rope_fields_by_window, with_rope_by_window
from megatron.hugging_face.weight_map import WeightRule, concat, experts, identity

_MEGATRON, _HF = "decoder.layers.{}.", "model.layers.{}."
_MLPS = ("dense", "sparse")
OF_BALANCE = ("router_aux_loss_coef", "output_router_logits")
"""Fields of the balance loss, which training sets by its own flags."""
ALL_SPARSE = {"decoder_sparse_step": 1, "mlp_only_layers": []}
"""Fields of models with experts in every layer."""


def _num_experts(config: ConfigFields) -> int:
    """Return the number of experts, which has two names in different versions of Transformers."""
    return int(config.one_of("num_local_experts", "num_experts") or config.take("num_experts"))


def _mixtral_settings(config: ConfigFields) -> ModelDescription:
    settings = MISTRAL.settings(config)
    return replace(
        settings,
        num_moe_experts=_num_experts(config),
        moe_router_topk=config.take("num_experts_per_tok"),
        moe_ffn_hidden_size=settings.ffn_hidden_size,
    )


def _mixtral_fields(settings: ModelDescription) -> dict[str, Any]:
    return {
        **MISTRAL.fields(settings),
        "intermediate_size": settings.experts_width,
        "num_local_experts": settings.num_moe_experts or 1,
        "num_experts_per_tok": settings.moe_router_topk,
    }


def _qwen_settings(dense: ModelDescription, config: ConfigFields) -> ModelDescription:
    return replace(
        dense,
        num_moe_experts=_num_experts(config),
        moe_router_topk=config.take("num_experts_per_tok"),
        moe_ffn_hidden_size=config.take("moe_intermediate_size"),
        moe_router_pre_softmax=not config.take("norm_topk_prob", False),
    )


def _qwen_fields(settings: ModelDescription) -> dict[str, Any]:
    return {
        "num_experts": settings.num_moe_experts or 1,
        "num_experts_per_tok": settings.moe_router_topk,
        "moe_intermediate_size": settings.experts_width,
        "norm_topk_prob": not settings.moe_router_pre_softmax,
    }


def _qwen2_settings(config: ConfigFields) -> ModelDescription:
    return replace(
        _qwen_settings(QWEN2.settings(config), config),
        moe_shared_expert_intermediate_size=config.take("shared_expert_intermediate_size"),
        moe_shared_expert_gate=True,
    )


def _qwen2_fields(settings: ModelDescription) -> dict[str, Any]:
    fields = {**QWEN2.fields(settings), **_qwen_fields(settings)}
    del fields["head_dim"]
    width = settings.moe_shared_expert_intermediate_size or 0
    return {**fields, "shared_expert_intermediate_size": width}


def _qwen2_rules(settings: ModelDescription) -> list[WeightRule]:
    return with_shared_expert(_rules(QWEN2, "mlp", "gate_proj", "up_proj", "down_proj")(settings))


def with_shared_expert(rules: list[WeightRule], *, has_gate: bool = True) -> list[WeightRule]:
    """Return `rules` and the rules of the shared expert and of its gate."""
    here, there = _MEGATRON + "mlp.shared_experts.", _HF + "mlp.shared_expert."
    gate_and_up = (there + "gate_proj.weight", there + "up_proj.weight")
    gate = identity(here + "gate_weight", _HF + "mlp.shared_expert_gate.weight")
    return [
        *rules,
        concat(here + "linear_fc1.weight", *gate_and_up),
        identity(here + "linear_fc2.weight", there + "down_proj.weight"),
        *[gate] * has_gate,
    ]


def _rules(
    dense: Family, block: str, gate: str, up: str, down: str
) -> Callable[[ModelDescription], list[WeightRule]]:
    """Return the `Family.rules` of a dense family with experts as its MLP."""

    def rules(settings: ModelDescription) -> list[WeightRule]:
        experts = expert_rules(settings, block, gate, up, down)
        return by_mlp(dense.rules(settings), experts, settings)

    return rules


def with_mlp_kinds(model: ModelDescription, config: ConfigFields) -> ModelDescription:
    """Return `model` with experts in the layers that `mlp_layer_types` lists, if it is stated."""
    kinds = config.take("mlp_layer_types", None)
    if kinds is None:
        return model
    if set(kinds) - set(_MLPS):
        config.only("mlp_layer_types", *_MLPS)
    return replace(model, moe_layer_freq=[int(kind == _MLPS[1]) for kind in kinds])


def mlp_kinds(settings: ModelDescription) -> list[str]:
    """Return the value of `mlp_layer_types`."""
    return [_MLPS[has_experts] for has_experts in settings.has_experts]


def by_mlp(
    dense: list[WeightRule], experts: list[WeightRule], settings: ModelDescription
) -> list[WeightRule]:
    """Return the rules of a dense model with `experts` in place of the MLP where the model has
    experts."""
    layers = range(settings.num_layers)
    with_them = tuple(n for n in layers if settings.has_experts[n])
    without = tuple(n for n in layers if n not in with_them)
    return [
        *(rule for rule in dense if ".mlp." not in rule.megatron_name),
        *(replace(rule, layers=without) for rule in dense if ".mlp." in rule.megatron_name),
        *(replace(rule, layers=with_them) for rule in experts),
    ]


def _mellum_settings(config: ConfigFields) -> ModelDescription:
    dense = replace(gated_settings(config), swiglu=True, qk_layernorm=True)
    dense = with_window(dense, config, [False] * dense.num_layers)
    dense = with_rope_by_window(dense, config, base=500_000.0, local_base=10_000.0)
    return with_mlp_kinds(_qwen_settings(dense, config), config)


def _mellum_fields(settings: ModelDescription) -> dict[str, Any]:
    fields = {**QWEN3.fields(settings), **_qwen_fields(settings), **window_fields(settings)}
    del fields["rope_theta"], fields["rope_scaling"]
    added = {"mlp_layer_types": mlp_kinds(settings), **rope_fields_by_window(settings)}
    return {**fields, **added}


def _flint_settings(config: ConfigFields) -> ModelDescription:
    dense = replace(LLAMA.settings(config), qk_layernorm=True, softmax_type="learnable")
    layers = range(dense.num_layers)
    usual = [n > 1 and n % 4 != 1 and n != layers[-1] for n in layers]
    dense = with_window(dense, config, usual)
    without_experts = config.take("mlp_only_layers", [0, 1])
    return replace(
        _qwen_settings(dense, config),
        no_rope_freq=[int(not has_window) for has_window in dense.windowed_layers],
        moe_layer_freq=[int(n not in without_experts) for n in layers],
        moe_shared_expert_intermediate_size=config.take("shared_expert_intermediate_size"),
        moe_router_score_function="sigmoid",
    )


def _flint_fields(settings: ModelDescription) -> dict[str, Any]:
    return {
        **LLAMA.fields(settings),
        **_qwen_fields(settings),
        **window_fields(settings),
        "mlp_only_layers": [n for n, has_some in enumerate(settings.has_experts) if not has_some],
        "shared_expert_intermediate_size": settings.moe_shared_expert_intermediate_size or 0,
    }


def _flint_rules(settings: ModelDescription) -> list[WeightRule]:
    sinks = "self_attention.core_attention.softmax_offset", "self_attn.softmax_offset"
    experts = expert_rules(settings, "mlp", "gate_proj", "up_proj", "down_proj")
    return [
        *by_mlp(LLAMA.rules(settings), with_shared_expert(experts, has_gate=False), settings),
        identity(_MEGATRON + sinks[0], _HF + sinks[1]),
    ]


def expert_rules(
    settings: ModelDescription, block: str, gate: str, up: str, down: str
) -> list[WeightRule]:
    """Return the rules of a layer's experts, their router and the norm before them."""
    count = settings.num_moe_experts or 1
    hf_prefix, megatron_prefix = (
        f"{_HF}{block}.experts.{{expert}}.",
        f"{_MEGATRON}mlp.experts.experts.",
    )
    return [
        identity(_MEGATRON + "pre_mlp_layernorm.weight", _HF + "post_attention_layernorm.weight"),
        identity(_MEGATRON + "mlp.router.weight", f"{_HF}{block}.gate.weight"),
        experts(
            megatron_prefix + "linear_fc1.weight",
            count,
            f"{hf_prefix}{gate}.weight",
            f"{hf_prefix}{up}.weight",
        ),
        experts(megatron_prefix + "linear_fc2.weight", count, f"{hf_prefix}{down}.weight"),
    ]


MIXTRAL = replace(
    MISTRAL,
    model_type="mixtral",
    architecture="MixtralForCausalLM",
    settings=_mixtral_settings,
    fields=_mixtral_fields,
    rules=_rules(MISTRAL, "block_sparse_moe", "w1", "w3", "w2"),
    only={**MISTRAL.only, "router_jitter_noise": 0.0},
    unused=OF_BALANCE,
    absent={"num_key_value_heads": 8, "rope_theta": 1_000_000.0},
)
QWEN2_MOE = replace(
    QWEN2,
    model_type="qwen2_moe",
    architecture="Qwen2MoeForCausalLM",
    settings=_qwen2_settings,
    fields=_qwen2_fields,
    rules=_qwen2_rules,
    only={**QWEN2.only, **ALL_SPARSE, "qkv_bias": True},
    unused=(*QWEN2.unused, *OF_BALANCE),
    absent={"num_key_value_heads": 16},
)
QWEN3_MOE = replace(
    QWEN3,
    model_type="qwen3_moe",
    architecture="Qwen3MoeForCausalLM",
    settings=lambda config: _qwen_settings(QWEN3.settings(config), config),
    fields=lambda settings: {**QWEN3.fields(settings), **_qwen_fields(settings)},
    rules=_rules(QWEN3, "mlp", "gate_proj", "up_proj", "down_proj"),
    only={**QWEN3.only, **ALL_SPARSE},
    unused=(*QWEN3.unused, *OF_BALANCE),
    absent={"num_key_value_heads": 4},
)
MELLUM = replace(
    QWEN3_MOE,
    model_type="mellum",
    architecture="MellumForCausalLM",
    settings=_mellum_settings,
    fields=_mellum_fields,
    only={**GATED, "attention_bias": False},
    unused=(
        *OF_BALANCE,
        "num_mtp_layers",
        "num_nextn_predict_layers",
        "mtp_layer_types",
        "mtp_mlp_layer_types",
    ),
    absent={
        "num_key_value_heads": 4, "head_dim": 128, "sliding_window": 1024, "norm_topk_prob": True,
    },
    left_out={r"mtp\..*": "the layers that predict later tokens"},
)  # fmt: skip
FLINT = replace(
    LLAMA,
    model_type="flint",
    architecture="FlintForCausalLM",
    settings=_flint_settings,
    fields=_flint_fields,
    rules=_flint_rules,
    only={"hidden_act": "silu", "attention_bias": False, "decoder_sparse_step": 1,
          "norm_topk_prob": True},
    unused=OF_BALANCE,
    absent={"num_key_value_heads": 4, "head_dim": 128, "sliding_window": 513,
            "norm_topk_prob": True},
)  # fmt: skip
