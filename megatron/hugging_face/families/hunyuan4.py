"""Hunyuan 4 (`hy_v4`): sparse latent attention with gates and sinks between residual streams.

The layers share the keys of few indexers, as in GLM-5.2. The streams (hyper-connections, arXiv
2512.24880) are not mixed. The activation of routed experts is clamped.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from megatron.hugging_face.config_fields import ConfigFields
from megatron.hugging_face.families.deepseek import (
    DEEPSEEK_V32,
    indexer_kinds,
    v32_fields,
    v32_rules,
    v32_settings,
    with_shared_keys,
)
from megatron.hugging_face.model_description import ModelDescription
from megatron.hugging_face.weight_map import (
    RowRange,
    WeightRule,
    alternating_experts,
    identity,
    with_others,
)

_MEGATRON, _HF = "decoder.layers.{}.", "model.layers.{}."
_GATE, _SINKS = ".linear_gate.", "self_attn.learnable_sink_param"
_STREAMS = {"hc_mult": "mhc_num_residual_streams", "hc_eps": "mhc_epsilon",
            "hc_magnitude": "mhc_post_magnitude"}  # fmt: skip
"""Field -> setting."""
_IGNORED = ("index_topk_pattern", "index_topk_freq", "index_skip_topk_offset")
"""Fields of GLM-5.2 that Transformers does not read in this family."""


def _settings(config: ConfigFields) -> ModelDescription:
    mlps = config.take("mlp_layer_types", ["dense"])
    known = {"first_k_dense_replace": mlps.count("dense"), "mlp_layer_types": mlps}
    for name in _IGNORED:
        config = config.without(name)
    settings = with_shared_keys(v32_settings(config.with_fields(known)), config, freq=4)
    return replace(
        settings,
        rope_interleave=False,
        dsa_indexer_k_norm_epsilon=settings.layernorm_epsilon,
        softmax_type="learnable",
        attention_output_gate=True,
        mla_gate_by_channel=True,
        moe_activation_func_clamp_value=config.take("swiglu_limit"),
        enable_mhc_connections=True,
        mhc_sinkhorn_iterations=0,
        mhc_learned_contraction=True,
        **config.take_all(_STREAMS),
    )


def _fields(settings: ModelDescription) -> dict[str, Any]:
    fields = v32_fields(settings)
    dense = fields.pop("first_k_dense_replace")
    return {
        **fields,
        **settings.fields(_STREAMS),
        "mlp_layer_types": ["dense"] * dense + ["sparse"] * (settings.num_layers - dense),
        "indexer_types": indexer_kinds(settings),
        "swiglu_limit": settings.moe_activation_func_clamp_value,
    }


def _turned(settings: ModelDescription, heights: Sequence[int]) -> list[RowRange]:
    """Exchange the channels of a head that rotate and the others, which are first here.

    All heads and the key have the same order of channels, so the scores do not depend on it.
    """
    width = settings.dsa_indexer_head_dim or 0
    turned = settings.qk_pos_emb_head_dim
    others = width - turned
    return [
        rows
        for begin in range(0, heights[0], width)
        for rows in (
            RowRange(0, begin + others, begin, turned),
            RowRange(0, begin, begin + turned, others),
        )
    ]


def _rules(settings: ModelDescription) -> list[WeightRule]:
    rules = [
        replace(rule, hf_names=tuple(re.sub(r"\.g(ate)?_proj\.", _GATE, n) for n in rule.hf_names))
        for rule in v32_rules(settings)
    ]
    indexers = (".linear_wq_b.", ".linear_wk.", ".k_norm.")
    others = [
        replace(rule, row_map=_turned)
        for rule in rules
        if any(name in rule.megatron_name for name in indexers)
    ]
    for layer, theirs in {"linear_fc1": "gate_up_proj", "linear_fc2": "down_proj"}.items():
        rule = alternating_experts(
            f"{_MEGATRON}mlp.experts.experts.{layer}.weight", f"{_HF}mlp.experts.{theirs}",
            num_experts=settings.num_moe_experts or 1, num_blocks=1, is_transposed=False,
        )  # fmt: skip
        sparse = settings.layers_where(lambda kind: kind.has_experts)
        others.append(replace(rule, layers=sparse))
    added = {_MEGATRON + "self_attention.core_attention.softmax_offset": _HF + _SINKS}
    places = {
        _MEGATRON + "self_attention_hyper_connection.": _HF + "hc_pre.hc_attn_layer.hc_",
        _MEGATRON + "mlp_hyper_connection.": _HF + "hc_pre.hc_mlp_layer.hc_",
        "decoder.contraction.": "model.hc_pre.hc_head.hc_head_",
    }
    for here, there in places.items():
        for name, theirs in {"weight": "fn", "bias": "base", "alpha": "scale"}.items():
            added[here + name] = there + theirs
    return [*with_others(rules, *others), *(identity(*names) for names in added.items())]


HY_V4 = replace(
    DEEPSEEK_V32,
    model_type="hy_v4",
    architecture="HYV4ForCausalLM",
    settings=_settings,
    fields=_fields,
    rules=_rules,
    unused=(*DEEPSEEK_V32.unused, "learnable_sink_init", *_IGNORED),
    absent={"q_lora_rank": 1536, "routed_scaling_factor": 2.827, "hc_mult": 4, "hc_eps": 1e-6,
            "hc_magnitude": 2.0, "swiglu_limit": 10.0},
    # Names of the modules of Transformers, which writes files with the names of the rules.
    other_names={
        r"\.gate_proj\.": _GATE,
        r"self_attn\.sinks": _SINKS,
        r"\.attn_hc\.": ".hc_pre.hc_attn_layer.hc_",
        r"\.ffn_hc\.": ".hc_pre.hc_mlp_layer.hc_",
        r"model\.hc_head\.hc_": "model.hc_pre.hc_head.hc_head_",
    },
    left_out={r"model\.mtp_layers\..*": "the layers that predict later tokens"},
)  # fmt: skip
