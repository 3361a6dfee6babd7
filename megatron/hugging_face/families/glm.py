"""GLM-4: half of every head rotates, in pairs of adjacent channels; gate and up are one tensor.

Team GLM, "ChatGLM: A Family of Large Language Models from GLM-130B to GLM-4 All Tools", section 2,
arXiv 2406.12793. The later GLM-4 (`glm4`) also has norms after each branch. GLM-4.5 (`glm4_moe`)
has the experts of DeepSeek-V3 ("GLM-4.5", section 2.1, arXiv 2508.06471), like dots.llm1 (arXiv
2506.05767), whose heads rotate completely, and Solar
Open, which has no dense layer. Multi-token prediction layers are left out.
"""

from __future__ import annotations

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
from megatron.hugging_face.families.family import window_fields, with_window
from megatron.hugging_face.families.llama import GATED, LLAMA
from megatron.hugging_face.model_description import ModelDescription
from megatron.hugging_face.weight_map import WeightRule, identity, with_others

_MEGATRON, _HF = "decoder.layers.{}.", "model.layers.{}."
_GATE_AND_UP = identity(_MEGATRON + "mlp.linear_fc1.weight", _HF + "mlp.gate_up_proj.weight")


def _settings(config: ConfigFields) -> ModelDescription:
    has_bias = config.take("attention_bias", True)
    return replace(LLAMA.settings(config), add_qkv_bias=has_bias, rotary_interleaved=True)


def _fields(settings: ModelDescription) -> dict[str, Any]:
    return {
        **LLAMA.fields(settings),
        "attention_bias": settings.add_qkv_bias,
        "partial_rotary_factor": settings.rotary_percent,
    }


def _rules(settings: ModelDescription) -> list[WeightRule]:
    return with_others(LLAMA.rules(settings), _GATE_AND_UP)


def _glm4_rules(settings: ModelDescription) -> list[WeightRule]:
    after = ("post_self_attn_layernorm.weight", "post_mlp_layernorm.weight")
    return [*_rules(settings), *(identity(_MEGATRON + name, _HF + name) for name in after)]


def _glm4_moe_settings(config: ConfigFields) -> ModelDescription:
    return replace(
        judged_by_sigmoid(with_experts(LLAMA.settings(config), config), config),
        add_qkv_bias=config.take("attention_bias", False),
        qk_layernorm=config.take("use_qk_norm", False),
    )


def _glm4_moe_fields(settings: ModelDescription) -> dict[str, Any]:
    return {
        **_fields(settings),
        **experts_fields(settings),
        "use_qk_norm": settings.qk_layernorm,
        "norm_topk_prob": True,
        "num_nextn_predict_layers": 0,
    }


def _solar_settings(config: ConfigFields) -> ModelDescription:
    config.take("intermediate_size", None)  # there is no dense layer
    width = config.take("moe_intermediate_size")
    usual = config.with_fields({"intermediate_size": width, "first_k_dense_replace": 0})
    settings = judged_by_sigmoid(with_experts(LLAMA.settings(usual), usual), usual)
    config.only("first_k_dense_replace", 0)
    return replace(settings, add_qkv_bias=config.take("attention_bias", False))


def _dots1_settings(config: ConfigFields) -> ModelDescription:
    dense = LLAMA.settings(config)
    usual = [False] * dense.num_layers
    dense = replace(with_window(dense, config, usual), qk_layernorm=True)
    return judged_by_sigmoid(with_experts(dense, config), config)


def _dots1_fields(settings: ModelDescription) -> dict[str, Any]:
    added = {**experts_fields(settings), **window_fields(settings), "norm_topk_prob": True}
    return {**LLAMA.fields(settings), **added}


def _expert_rules(settings: ModelDescription) -> list[WeightRule]:
    return with_expert_layers(LLAMA.rules(settings), settings)


GLM = replace(
    LLAMA,
    model_type="glm",
    architecture="GlmForCausalLM",
    settings=_settings,
    fields=_fields,
    rules=_rules,
    only=GATED,
    absent={"num_key_value_heads": 2, "head_dim": 128, "partial_rotary_factor": 0.5},
)
GLM4 = replace(
    GLM,
    model_type="glm4",
    architecture="Glm4ForCausalLM",
    settings=lambda config: replace(_settings(config), sandwich_norm=True),
    rules=_glm4_rules,
)
GLM4_MOE = replace(
    LLAMA,
    model_type="glm4_moe",
    architecture="Glm4MoeForCausalLM",
    settings=_glm4_moe_settings,
    fields=_glm4_moe_fields,
    rules=_expert_rules,
    only=GATED,
    unused=("num_mtp_layers", "num_nextn_predict_layers"),
    absent={"num_key_value_heads": 8, "first_k_dense_replace": 1, "partial_rotary_factor": 0.5},
    left_out=LATER_TOKENS,
)
SOLAR_OPEN = replace(
    LLAMA,
    model_type="solar_open",
    architecture="SolarOpenForCausalLM",
    settings=_solar_settings,
    fields=_glm4_moe_fields,
    rules=_expert_rules,
    only={**GATED, "use_qk_norm": False},
    unused=GLM4_MOE.unused,
    absent={"num_key_value_heads": 8, "head_dim": 128, "rope_theta": 1_000_000.0},
)
DOTS1 = replace(
    LLAMA,
    model_type="dots1",
    architecture="Dots1ForCausalLM",
    settings=_dots1_settings,
    fields=_dots1_fields,
    rules=_expert_rules,
    unused=("max_window_layers",),
    absent={"num_key_value_heads": 32, "sliding_window": 4096, "norm_topk_prob": False},
)
