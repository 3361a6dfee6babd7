"""MiMo-V2-Flash: in layers with a window other heads, sinks and positions; scaled, narrow values.

Xiaomi LLM-Core Team, "MiMo-V2-Flash Technical Report". The layers that predict later tokens are
left out.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from megatron.hugging_face.config_fields import ConfigFields
from megatron.hugging_face.families.deepseek import judged_by_sigmoid, with_expert_layers
from megatron.hugging_face.families.family import window_fields, with_blocks, with_window
from megatron.hugging_face.families.llama import LLAMA, gated_settings
from megatron.hugging_face.model_description import ModelDescription
from megatron.hugging_face.rope import FULL, SLIDING, rope_fields_by_kind, with_rope_by_kind
from megatron.hugging_face.weight_map import WeightRule, by_layer_size, identity

_ROTARY = {
    kind: {"rope_theta": base, "partial_rotary_factor": 0.334}
    for kind, base in ((FULL, 5_000_000.0), (SLIDING, 10_000.0))
}
_MLPS = {False: "dense", True: "sparse"}


def _settings(config: ConfigFields) -> ModelDescription:
    model = replace(gated_settings(config), swiglu=True)
    layers = range(model.num_layers)
    model = with_window(model, config, [n > 0 and (n + 1) % 6 != 0 for n in layers])
    model, local = with_rope_by_kind(model, config, _ROTARY)
    own = {"num_query_groups": 2 * model.num_query_groups, "softmax_type": "learnable", **local}
    mlps = config.take("mlp_layer_types", ["dense"] + ["sparse"] * (model.num_layers - 1))
    if set(mlps) - {*_MLPS.values()}:
        config.only("mlp_layer_types", [*_MLPS.values()])
    factor = config.take("routed_scaling_factor", 1.0)
    model = replace(
        with_blocks(
            model, [own if has_it else {} for has_it in model.windowed_layers], [{}] * len(layers)
        ),
        group_query_attention=True,
        v_channels=config.take("v_head_dim", 128),
        attention_value_scale=config.take("attention_value_scale", 1.0),
        num_moe_experts=config.one_of("n_routed_experts", "num_local_experts") or 256,
        moe_layer_freq=[int(kind == "sparse") for kind in mlps],
        moe_ffn_hidden_size=config.take("moe_intermediate_size", 2048),
        moe_router_topk=config.take("num_experts_per_tok", 8),
        moe_router_topk_scaling_factor=None if factor == 1.0 else factor,
        moe_router_dtype="fp32",
    )
    return judged_by_sigmoid(model, config)


def _fields(settings: ModelDescription) -> dict[str, Any]:
    fields = {**LLAMA.fields(settings), **window_fields(settings)}
    del fields["rope_theta"], fields["rope_scaling"]
    return {
        **fields,
        **rope_fields_by_kind(settings, _ROTARY),
        "v_head_dim": settings.value_dim,
        "attention_value_scale": settings.attention_value_scale,
        "mlp_layer_types": [_MLPS[has_them] for has_them in settings.has_experts],
        "n_routed_experts": settings.num_moe_experts or 1,
        "moe_intermediate_size": settings.experts_width,
        "num_experts_per_tok": settings.moe_router_topk,
        "routed_scaling_factor": settings.moe_router_topk_scaling_factor or 1.0,
        "n_group": settings.moe_router_num_groups or 1,
        "topk_group": settings.moe_router_group_topk or 1,
        "norm_topk_prob": True,
    }


def _rules(settings: ModelDescription) -> list[WeightRule]:
    sinks = "decoder.layers.{}.self_attention.core_attention.softmax_offset"
    own = tuple(n for n, block in enumerate(settings.blocks) if "softmax_type" in block.settings)
    rules = [
        rule
        for rule in with_expert_layers(LLAMA.rules(settings), settings)
        if ".shared_experts." not in rule.megatron_name
    ]
    rules.append(
        replace(identity(sinks, "model.layers.{}.self_attn.attention_sink_bias"), layers=own)
    )
    return rules


MIMO_V2_FLASH = replace(
    LLAMA,
    model_type="mimo_v2_flash",
    architecture="MiMoV2FlashForCausalLM",
    settings=_settings,
    fields=_fields,
    rules=lambda settings: by_layer_size(_rules, settings),
    only={"hidden_act": "silu", "attention_bias": False},
    unused=("output_router_logits",),
    absent={"num_key_value_heads": 4, "head_dim": 192, "sliding_window": 129,
            "attention_value_scale": 0.707},
    left_out={r"model\.mtp\..*": "the layers that predict later tokens"},
)  # fmt: skip
