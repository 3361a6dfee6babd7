"""Hunyuan: heads are normed after their rotation; the base of the rotation has a fixed factor.

`hunyuan_v1_moe` has experts in every layer, and a shared expert of the same width.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from megatron.hugging_face.config_fields import ConfigFields
from megatron.hugging_face.families.deepseek import with_expert_layers
from megatron.hugging_face.families.experts import OF_BALANCE
from megatron.hugging_face.families.llama import LLAMA
from megatron.hugging_face.model_description import ModelDescription
from megatron.hugging_face.weight_map import WeightRule

_NAMES = {
    "self_attn.q_norm.": "self_attn.query_layernorm.",
    "self_attn.k_norm.": "self_attn.key_layernorm.",
    "mlp.gate.weight": "mlp.gate.wg.weight",
    "mlp.shared_experts.": "mlp.shared_mlp.",
}
"""Part of a name in related families -> part of Hunyuan's name."""
_IGNORED = (
    "eod_token_id", "add_classification_head", "anyres_pooling_size", "attention_head_dim",
    "cla_share_factor", "class_num", "dense_list", "im_end_id", "im_newline_id", "im_start_id",
    "image_token_id", "mask_init_id", "max_image_size", "moe_intermediate_size",
    "moe_layer_num_skipped", "norm_topk_prob", "norm_type", "num_media_embeds",
    "num_shared_expert", "org_vocab_size", "pool_type", "skip_cls_token", "text_end_id",
    "text_start_id", "use_mixed_mlp_moe", "use_qk_norm", "use_rotary_pos_emb",
)  # fmt: skip
"""Fields of published files that Transformers' model ignores."""


def _settings(config: ConfigFields) -> ModelDescription:
    rope = dict(config.one_of("rope_parameters", "rope_scaling") or {})
    kind, alpha = rope.get("rope_type", rope.get("type")), rope.pop("alpha", None)
    if kind == "dynamic" and alpha:
        width = config.take("head_dim", None)
        width = width or config.take("hidden_size") // config.take("num_attention_heads")
        base = config.one_of(("rope_parameters.rope_theta", rope.get("rope_theta")), "rope_theta")
        base = (base or 10_000.0) * alpha ** (width / (width - 2))
        # Transformers' model does not read the other fields of this scaling.
        rope = {"rope_theta": base}
        config.take("partial_rotary_factor", None)
        config = config.with_fields({"rope_theta": base, "partial_rotary_factor": None})
    config = config.with_fields({"rope_parameters": rope, "rope_scaling": None})
    return replace(LLAMA.settings(config), qk_layernorm=True, qk_layernorm_after_rope=True)


def _rules(settings: ModelDescription) -> list[WeightRule]:
    rules = LLAMA.rules(settings)
    if settings.num_moe_experts is not None:
        rules = with_expert_layers(rules, settings)
    for part, written in _NAMES.items():
        rules = [
            replace(rule, hf_names=tuple(name.replace(part, written) for name in rule.hf_names))
            for rule in rules
        ]
    return rules


def _moe_settings(config: ConfigFields) -> ModelDescription:
    settings = _settings(config)
    found = (config.take("num_experts"), config.take("moe_topk"))
    experts, topk = (set(x) if isinstance(x, list) else {x} for x in found)
    if len(experts) > 1 or len(topk) > 1:
        config.only("num_experts", *experts)
        config.only("moe_topk", *topk)
    return replace(
        settings,
        num_moe_experts=experts.pop(),
        moe_router_topk=topk.pop(),
        moe_ffn_hidden_size=settings.ffn_hidden_size,
        moe_shared_expert_intermediate_size=settings.ffn_hidden_size,
        moe_router_dtype="fp32",
    )


def _moe_fields(settings: ModelDescription) -> dict[str, Any]:
    return {
        **LLAMA.fields(settings),
        "intermediate_size": settings.experts_width,
        "num_experts": settings.num_moe_experts or 1,
        "moe_topk": settings.moe_router_topk,
    }


HUNYUAN_DENSE = replace(
    LLAMA,
    model_type="hunyuan_v1_dense",
    architecture="HunYuanDenseV1ForCausalLM",
    settings=_settings,
    rules=_rules,
    unused=_IGNORED,
)
HUNYUAN_MOE = replace(
    HUNYUAN_DENSE,
    model_type="hunyuan_v1_moe",
    architecture="HunYuanMoEV1ForCausalLM",
    settings=_moe_settings,
    fields=_moe_fields,
    unused=(*_IGNORED, *OF_BALANCE),
)
FAMILIES = (HUNYUAN_DENSE, HUNYUAN_MOE)
