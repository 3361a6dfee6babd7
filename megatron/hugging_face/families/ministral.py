"""Ministral 3 and Mistral 4: queries grow with their position beyond the original context.

The factor has Llama 4's form, 1 + b ln(1 + floor(position / context)). Mistral 4 has the latent
attention of DeepSeek-V3, experts judged by a softmax, and one tensor of all experts.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from megatron.hugging_face.config_fields import ConfigFields
from megatron.hugging_face.families.deepseek import (
    DEEPSEEK_V3,
    FOLLOWING,
    experts_fields,
    latent_fields,
    latent_settings,
    with_experts,
)
from megatron.hugging_face.families.llama import LLAMA, MISTRAL
from megatron.hugging_face.model_description import ModelDescription
from megatron.hugging_face.weight_map import WeightRule, joined_experts, with_others

_BETA, _CONTEXT = "llama_4_scaling_beta", "original_max_position_embeddings"
_ROPE: dict[str, Any] = {
    "type": "yarn", "beta_fast": 32.0, "beta_slow": 1.0, "mscale_all_dim": 1.0, "mscale": 1.0,
    _BETA: 0.1,
}  # fmt: skip
"""Transformers' positions if the config has none, except the base, the factor and the context."""
_MINISTRAL_ROPE = {
    **_ROPE, "rope_theta": 1_000_000.0, "factor": 16.0, "original_max_position_embeddings": 16384,
}  # fmt: skip
_MISTRAL4_ROPE = {
    **_ROPE, "rope_theta": 10_000.0, "factor": 128.0, "original_max_position_embeddings": 8192,
}  # fmt: skip


def _apart(config: ConfigFields) -> tuple[ConfigFields, dict[str, Any]]:
    """Return the config with the usual fields of rotary positions, and the other ones of them."""
    rope = dict(
        config.one_of("rope_parameters", "rope_scaling") or config.absent["rope_parameters"]
    )
    names = (_BETA, "max_position_embeddings", "partial_rotary_factor")
    others = {name: rope.pop(name, None) for name in names}
    if rope.get("rope_type", rope.get("type", "default")) == "default":
        others[_CONTEXT] = rope.pop(_CONTEXT, None)
    view = config.with_fields({"rope_parameters": rope, "rope_scaling": None})
    return view, others


def _with_beta(settings: ModelDescription, others: dict[str, Any]) -> ModelDescription:
    context = others.get(_CONTEXT) or settings.original_max_position_embeddings
    beta = others[_BETA] or 0.0
    return replace(settings, query_scale_beta=beta, original_max_position_embeddings=context)


def _with_rope(fields: dict[str, Any], settings: ModelDescription) -> dict[str, Any]:
    """Return `fields` with the positions in the newer form, which has the factor on queries."""
    rope = {"rope_type": "default", **(fields.pop("rope_scaling") or {})}
    rope |= {"rope_theta": fields.pop("rope_theta"), _BETA: settings.query_scale_beta}
    rope[_CONTEXT] = settings.original_max_position_embeddings
    return {**fields, "rope_parameters": rope}


def _ministral3_settings(config: ConfigFields) -> ModelDescription:
    view, others = _apart(config)
    share = others["partial_rotary_factor"]
    if share is not None:
        view = view.with_fields({"partial_rotary_factor": share})
    return _with_beta(MISTRAL.settings(view), others)


def _mistral4_settings(config: ConfigFields) -> ModelDescription:
    view, others = _apart(config)
    config.take("partial_rotary_factor", None)  # the widths determine the share
    view = view.with_fields({"partial_rotary_factor": None})
    settings = with_experts(latent_settings(view), view)
    width = settings.qk_head_dim + settings.qk_pos_emb_head_dim
    share = settings.qk_pos_emb_head_dim / width
    if others["partial_rotary_factor"] not in (None, share):
        config.with_fields(others).only("partial_rotary_factor", share)
    return replace(
        _with_beta(settings, others),
        moe_router_pre_softmax=not config.take("norm_topk_prob", True),
        rope_interleave=config.take("rope_interleave", True),
    )


def _mistral4_fields(settings: ModelDescription) -> dict[str, Any]:
    return {
        **_with_rope(latent_fields(settings), settings),
        **experts_fields(settings),
        "norm_topk_prob": not settings.moe_router_pre_softmax,
        "rope_interleave": settings.rope_interleave,
    }


def _mistral4_rules(settings: ModelDescription) -> list[WeightRule]:
    layers = tuple(n for n, has_some in enumerate(settings.has_experts) if has_some)
    tensors = [f"model.layers.{{}}.mlp.experts.{part}_proj" for part in ("gate_up", "down")]
    rules = joined_experts(settings.num_moe_experts or 1, *tensors)
    return with_others(
        DEEPSEEK_V3.rules(settings), *(replace(rule, layers=layers) for rule in rules)
    )


MINISTRAL3 = replace(
    MISTRAL,
    model_type="ministral3",
    architecture="Ministral3ForCausalLM",
    settings=_ministral3_settings,
    fields=lambda settings: _with_rope(MISTRAL.fields(settings), settings),
    absent={"num_key_value_heads": 8, "head_dim": 128, "rope_parameters": _MINISTRAL_ROPE},
)
MISTRAL4 = replace(
    LLAMA,
    model_type="mistral4",
    architecture="Mistral4ForCausalLM",
    settings=_mistral4_settings,
    fields=_mistral4_fields,
    rules=_mistral4_rules,
    only={**LLAMA.only, "n_group": 1, "topk_group": 1},
    unused=FOLLOWING,
    absent={"num_key_value_heads": 32, "q_lora_rank": 1024, "rope_parameters": _MISTRAL4_ROPE},
)
FAMILIES = (MINISTRAL3, MISTRAL4)
