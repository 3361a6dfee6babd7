"""Llama 4: chunks and rotary positions in most layers, experts beside a shared one in some.

"The Llama 4 Herd", Meta, 2025; the query factor of layers without positions is K. M. Nakanishi,
"Scalable-Softmax Is Superior for Attention", arXiv 2501.19399. Only the text model is supported,
without the scaled frequencies of Scout (`high_freq_factor` 1).
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from megatron.hugging_face.config_fields import ConfigFields
from megatron.hugging_face.families.deepseek import with_expert_layers
from megatron.hugging_face.families.experts import OF_BALANCE
from megatron.hugging_face.families.llama import LLAMA
from megatron.hugging_face.families.relatives import SMOLLM3
from megatron.hugging_face.model_description import ModelDescription
from megatron.hugging_face.rope import FULL
from megatron.hugging_face.weight_map import WeightRule, alternating_experts, with_others

_CHUNKED = "chunked_attention"
_NAMES = {
    ".mlp.gate.weight": ".feed_forward.router.weight",
    ".mlp.shared_experts.": ".feed_forward.shared_expert.",
    ".mlp.": ".feed_forward.",
}


def _settings(config: ConfigFields) -> ModelDescription:
    model = SMOLLM3.settings(config)
    layers, width = range(model.num_layers), model.ffn_hidden_size
    skips, step = (
        model.no_rope_freq or [0] * len(layers),
        config.take("interleave_moe_layer_step", 1),
    )
    sparse = config.take("moe_layers", [n for n in layers if (n + 1) % step == 0])
    kinds = config.take("layer_types", [FULL if skipped else _CHUNKED for skipped in skips])
    if set(kinds) - {FULL, _CHUNKED}:
        config.only("layer_types", [_CHUNKED, FULL])
    is_tuned = bool(config.take("attn_temperature_tuning", False))
    return replace(
        model,
        rotary_interleaved=True,
        qk_l2_norm=config.take("use_qk_norm", False),
        attention_chunk_size=config.take("attention_chunk_size", None),
        window_attn_skip_freq=[int(kind == _CHUNKED) for kind in kinds],
        query_scale_beta=config.take("attn_scale", 0.1) * is_tuned,
        query_scale_interval=config.take("floor_scale", 8192),
        query_scale_without_rope=True,
        ffn_hidden_size=config.take("intermediate_size_mlp", 16384),
        num_moe_experts=config.take("num_local_experts", 16),
        moe_layer_freq=[int(n in sparse) for n in layers],
        moe_router_topk=config.only("num_experts_per_tok", 1) or 1,
        moe_router_score_function="sigmoid",
        moe_apply_probs_on_input=True,
        moe_ffn_hidden_size=width,
        moe_shared_expert_intermediate_size=width,
    )


def _fields(settings: ModelDescription) -> dict[str, Any]:
    layers = range(settings.num_layers)
    return {
        **SMOLLM3.fields(settings),
        "intermediate_size": settings.experts_width,
        "intermediate_size_mlp": settings.ffn_hidden_size,
        "num_local_experts": settings.num_moe_experts or 1,
        "moe_layers": [n for n in layers if settings.has_experts[n]],
        "layer_types": [_CHUNKED if settings.chunk_of(n + 1) else FULL for n in layers],
        "attention_chunk_size": settings.attention_chunk_size,
        "use_qk_norm": settings.qk_l2_norm,
        "attn_temperature_tuning": settings.query_scale_beta > 0,
        "attn_scale": settings.query_scale_beta or 0.1,
        "floor_scale": settings.query_scale_interval or settings.original_max_position_embeddings,
    }


def _rules(settings: ModelDescription) -> list[WeightRule]:
    stacked = {"linear_fc1": "gate_up_proj", "linear_fc2": "down_proj"}
    sparse = tuple(n for n, has_some in enumerate(settings.has_experts) if has_some)
    rules = with_others(
        with_expert_layers(LLAMA.rules(settings), settings),
        *(
            replace(
                alternating_experts(
                    f"decoder.layers.{{}}.mlp.experts.experts.{here}.weight",
                    f"model.layers.{{}}.mlp.experts.{there}",
                    num_experts=settings.num_moe_experts or 1,
                    num_blocks=1,
                    is_transposed=True,
                ),
                layers=sparse,
            )
            for here, there in stacked.items()
        ),
    )
    return [replace(rule, hf_names=tuple(map(_renamed, rule.hf_names))) for rule in rules]


def _renamed(name: str) -> str:
    for usual, own in _NAMES.items():
        name = name.replace(usual, own)
    return name


LLAMA4 = replace(
    LLAMA,
    model_type="llama4_text",
    architecture="Llama4ForCausalLM",
    settings=_settings,
    fields=_fields,
    rules=_rules,
    only={"hidden_act": "silu", "attention_bias": False},
    unused=(*OF_BALANCE, "router_jitter_noise"),
    absent={
        "num_key_value_heads": 8, "head_dim": 128, "attention_chunk_size": 8192,
        "use_qk_norm": True, "attn_temperature_tuning": True, "rope_theta": 500_000.0,
    },
)  # fmt: skip
