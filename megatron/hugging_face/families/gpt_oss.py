"""GPT-OSS: attention sinks, windows in every second layer, experts with biases and clamped inputs.

OpenAI, "gpt-oss-120b & gpt-oss-20b Model Card", section 2, arXiv 2508.10925. The published weights
of experts are MXFP4 (`megatron.hugging_face.quantized`).
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from megatron.hugging_face.config_fields import ConfigFields
from megatron.hugging_face.families.family import Family, window_fields, with_window
from megatron.hugging_face.families.llama import LLAMA, gated_settings, projections
from megatron.hugging_face.model_description import ModelDescription
from megatron.hugging_face.rope import with_rope
from megatron.hugging_face.weight_map import WeightRule, alternating_experts, identity

_MEGATRON, _HF = "decoder.layers.{}.", "model.layers.{}."
_GAIN, _BOUND = 1.702, 7.0
_ABSENT = {
    "num_key_value_heads": 8, "head_dim": 64, "sliding_window": 128, "rope_theta": 150_000.0,
    "rope_parameters": {
        "rope_type": "yarn", "factor": 32.0, "beta_fast": 32.0, "beta_slow": 1.0, "truncate": False,
        "original_max_position_embeddings": 4096,
    },
}  # fmt: skip


def _settings(config: ConfigFields) -> ModelDescription:
    settings = gated_settings(config)
    topk = config.take("num_experts_per_tok")
    config.only("experts_per_token", topk)
    settings = with_rope(settings, config)
    settings = with_window(settings, config, [n % 2 == 0 for n in range(settings.num_layers)])
    return replace(
        settings,
        add_bias_linear=True,
        softmax_type="learnable",
        quick_geglu=True,
        glu_linear_offset=1.0,
        activation_func_clamp_value=float(config.take("swiglu_limit", _BOUND)),
        num_moe_experts=config.take("num_local_experts"),
        moe_router_topk=topk,
        moe_ffn_hidden_size=settings.ffn_hidden_size,
    )


def _fields(settings: ModelDescription) -> dict[str, Any]:
    fields = LLAMA.fields(settings)
    if fields["rope_scaling"] is None:  # Transformers would replace it by this family's default
        base = fields["rope_theta"]
        fields["rope_parameters"] = {"rope_type": "default", "rope_theta": base}
    return {
        **fields,
        **window_fields(settings),
        "intermediate_size": settings.experts_width,
        "num_local_experts": settings.num_moe_experts or 1,
        "num_experts_per_tok": settings.moe_router_topk,
        "swiglu_limit": settings.activation_func_clamp_value,
    }


def _rules(settings: ModelDescription) -> list[WeightRule]:
    attention, hf_prefix = _MEGATRON + "self_attention.", _HF + "self_attn."
    experts, router = _MEGATRON + "mlp.experts.experts.", _MEGATRON + "mlp.router."
    count = settings.num_moe_experts or 1
    found = [rule for rule in LLAMA.rules(settings) if ".mlp." not in rule.megatron_name]
    found += [
        projections("bias"),
        identity(attention + "linear_proj.bias", hf_prefix + "o_proj.bias"),
        identity(attention + "core_attention.softmax_offset", hf_prefix + "sinks"),
        identity(_MEGATRON + "pre_mlp_layernorm.weight", _HF + "post_attention_layernorm.weight"),
    ]
    for kind in ("weight", "bias"):
        name = {"weight": "", "bias": "_bias"}[kind]
        found.append(identity(router + kind, f"{_HF}mlp.router.{kind}"))
        for layer, part, blocks in (
            ("linear_fc1", "gate_up_proj", 2),
            ("linear_fc2", "down_proj", 1),
        ):
            rule = alternating_experts(
                f"{experts}{layer}.{kind}",
                f"{_HF}mlp.experts.{part}{name}",
                num_experts=count,
                num_blocks=blocks,
                is_transposed=kind == "weight",
            )
            found.append(rule)
    return found


GPT_OSS = Family(
    "gpt_oss",
    "GptOssForCausalLM",
    _settings,
    _fields,
    _rules,
    only={"hidden_act": "silu", "attention_bias": True, "swiglu_alpha": _GAIN},
    unused=("router_aux_loss_coef", "output_router_logits", "initial_context_length"),
    absent=_ABSENT,
)
