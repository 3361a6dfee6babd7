"""Phi-3: a Llama with fused projections: queries, keys and values; gate and up."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from megatron.hugging_face.config_fields import ConfigFields
from megatron.hugging_face.families.llama import MISTRAL
from megatron.hugging_face.model_description import ModelDescription
from megatron.hugging_face.weight_map import WeightRule, fused_query_key_value, identity

_MEGATRON, _HF = "decoder.layers.{}.", "model.layers.{}."
_FUSED = {
    _MEGATRON + "self_attention.linear_qkv.weight": fused_query_key_value(
        _MEGATRON + "self_attention.linear_qkv.weight", _HF + "self_attn.qkv_proj.weight"
    ),
    _MEGATRON + "mlp.linear_fc1.weight": identity(
        _MEGATRON + "mlp.linear_fc1.weight", _HF + "mlp.gate_up_proj.weight"
    ),
}


def _settings(config: ConfigFields) -> ModelDescription:
    # Dropout affects training only, which has flags for it.
    for name in ("embd_pdrop", "resid_pdrop"):
        config.take(name, None)
    # The context before its extension to 128k; without rope_scaling it has no effect.
    config.take("original_max_position_embeddings", None)
    return MISTRAL.settings(config)


def _fields(settings: ModelDescription) -> dict[str, Any]:
    return {
        **{name: value for name, value in MISTRAL.fields(settings).items() if name != "head_dim"},
        "partial_rotary_factor": settings.rotary_percent,
        "original_max_position_embeddings": settings.max_position_embeddings,
        "pad_token_id": None,
    }


def _rules(settings: ModelDescription) -> list[WeightRule]:
    return [_FUSED.get(rule.megatron_name, rule) for rule in MISTRAL.rules(settings)]


PHI3 = replace(
    MISTRAL,
    model_type="phi3",
    architecture="Phi3ForCausalLM",
    settings=_settings,
    fields=_fields,
    rules=_rules,
    absent={},
)
