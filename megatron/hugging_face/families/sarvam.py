"""Sarvam: models with the layers of GLM-4.5 (`sarvam_moe`) and of DeepSeek-V3 (`sarvam_mla`).

Sarvam AI, "Sarvam 30B and 105B" (model cards, 2026). Published configs have other names of some
fields. Heads of `sarvam_moe` rotate completely, and its queries, keys and values are one tensor.
"""

from __future__ import annotations

from dataclasses import replace

from megatron.hugging_face.config_fields import ConfigFields
from megatron.hugging_face.families.deepseek import DEEPSEEK_V3
from megatron.hugging_face.families.glm import GLM4_MOE
from megatron.hugging_face.model_description import ModelDescription
from megatron.hugging_face.weight_map import (
    WeightRule,
    fused_query_key_value,
    renamed,
    with_others,
)

_NAMES = {
    "num_experts": "n_routed_experts",
    "num_shared_experts": "n_shared_experts",
    "use_qkv_bias": "attention_bias",
}
"""Field of published configs -> its name in Transformers."""
_WEIGHTS = {
    "model.embed_tokens.": "model.word_embeddings.",
    ".o_proj.": ".dense.",
    ".q_norm.": ".query_layernorm.",
    ".k_norm.": ".key_layernorm.",
    ".self_attn.": ".attention.",
    ".gate.e_score_correction_bias": ".gate.expert_bias",
}


def _usual(config: ConfigFields) -> ConfigFields:
    return config.renamed({a: b for a, b in _NAMES.items() if config.stated(a) is not None})


def _settings(config: ConfigFields) -> ModelDescription:
    return GLM4_MOE.settings(_usual(config))


def _rules(settings: ModelDescription) -> list[WeightRule]:
    kinds = ("weight", "bias") if settings.add_qkv_bias else ("weight",)
    fused = (
        fused_query_key_value(
            f"decoder.layers.{{}}.self_attention.linear_qkv.{kind}",
            f"model.layers.{{}}.attention.query_key_value.{kind}",
        )
        for kind in kinds
    )
    return renamed(with_others(GLM4_MOE.rules(settings), *fused), _WEIGHTS)


def _latent_settings(config: ConfigFields) -> ModelDescription:
    usual = _usual(config)
    scaling = config.stated("rope_scaling") or {}
    if "deepseek_yarn" in (scaling.get("type"), scaling.get("rope_type")):
        usual = usual.with_fields(
            {"rope_scaling": {**scaling, "type": "yarn", "rope_type": "yarn"}}
        )
    return DEEPSEEK_V3.settings(usual)


SARVAM_MOE = replace(
    GLM4_MOE,
    model_type="sarvam_moe",
    settings=_settings,
    rules=_rules,
    absent={"num_key_value_heads": 4, "head_dim": 64, "rope_theta": 8e6, "use_qk_norm": True,
            "routed_scaling_factor": 2.5, "first_k_dense_replace": 1},
)  # fmt: skip
SARVAM_MLA = replace(
    DEEPSEEK_V3,
    model_type="sarvam_mla",
    settings=_latent_settings,
    unused=(*DEEPSEEK_V3.unused, "num_mtp_layers", "head_dim", "q_head_dim"),
    absent={"n_group": 1, "topk_group": 1, "first_k_dense_replace": 1,
            "routed_scaling_factor": 2.5},
)  # fmt: skip
FAMILIES = (SARVAM_MOE, SARVAM_MLA)
