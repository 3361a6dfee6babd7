"""Falcon-H1: attention and Mamba-2 side by side in each layer, with factors at many places.

J. Zuo et al., "Falcon-H1: A Family of Hybrid-Head Language Models", arXiv 2507.22448.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from megatron.hugging_face.config_fields import ConfigFields
from megatron.hugging_face.families.llama import GATED, LLAMA
from megatron.hugging_face.families.state_space import mixer_fields, mixer_rules, mixer_settings
from megatron.hugging_face.model_description import ModelDescription
from megatron.hugging_face.weight_map import WeightRule, identity, renamed

_LAYER, _HF = "decoder.layers.{}.", "model.layers.{}."
_NORM = "self_attention.linear_qkv.layer_norm_weight"
_OF_ATTENTION = ("attention_in_multiplier", "key_multiplier", "attention_out_multiplier")
_NAMES = {
    ".post_attention_layernorm.": ".pre_ff_layernorm.", ".mlp.": ".feed_forward.",
    "model.norm.": "model.final_layernorm.",
}  # fmt: skip


def _settings(config: ConfigFields) -> ModelDescription:
    heads, width = config.take("mamba_n_heads", 128), config.take("mamba_d_head", "auto")
    inner = config.take("mamba_d_ssm", None) or config.take("mamba_expand", 2) * config.take(
        "hidden_size"
    )
    sizes = {"mamba_n_heads": heads, "mamba_d_head": inner // heads if width == "auto" else width}
    usual = config.with_fields(sizes)
    mixers, settings = mixer_settings(usual, "bamba"), LLAMA.settings(usual)
    usual.only("mamba_d_ssm", heads * sizes["mamba_d_head"])
    has_norm = config.take("mamba_rms_norm", False)
    if has_norm:
        config.only("mamba_norm_before_gate", False)
    config.take("mamba_norm_before_gate", None)
    parts = config.take("ssm_multipliers", [1.0] * 5)
    first, last = (config.take(f"ssm_{place}_multiplier", 1.0) for place in ("in", "out"))
    return replace(
        settings,
        experimental_attention_variant="attention_and_mamba2",
        **mixers,
        mamba_gated_norm=has_norm,
        mamba_factors=[first, *parts, last],
        attention_factors=[config.take(name, 1.0) for name in _OF_ATTENTION],
        mlp_factors=config.take("mlp_multipliers", [1.0, 1.0]),
        embedding_multiplier=config.take("embedding_multiplier", 1.0),
        logits_scaling=1 / config.take("lm_head_multiplier", 1.0),
    )


def _fields(settings: ModelDescription) -> dict[str, Any]:
    first, *parts, last = settings.factors_of_mamba
    return {
        **LLAMA.fields(settings),
        **mixer_fields(settings, "bamba"),
        "mamba_d_ssm": settings.mamba_heads * settings.mamba_head_dim,
        "mamba_rms_norm": settings.mamba_gated_norm,
        "mamba_norm_before_gate": False,
        "ssm_in_multiplier": first,
        "ssm_multipliers": parts,
        "ssm_out_multiplier": last,
        **dict(zip(_OF_ATTENTION, settings.factors_of_attention, strict=True)),
        "mlp_multipliers": settings.mlp_factors or [1.0, 1.0],
        "embedding_multiplier": settings.embedding_multiplier,
        "lm_head_multiplier": 1 / settings.logits_scaling,
    }


def _rules(settings: ModelDescription) -> list[WeightRule]:
    mamba = mixer_rules(settings, _HF + "mamba.", _LAYER + "self_attention.mamba.")
    return [
        *(r for r in renamed(LLAMA.rules(settings), _NAMES) if not r.megatron_name.endswith(_NORM)),
        identity(_LAYER + "input_layernorm.weight", _HF + "input_layernorm.weight"),
        *(r for r in mamba if settings.mamba_gated_norm or "norm_weight" not in r.megatron_name),
    ]


FALCON_H1 = replace(
    LLAMA,
    model_type="falcon_h1",
    architecture="FalconH1ForCausalLM",
    settings=_settings,
    fields=_fields,
    rules=_rules,
    only={**GATED, "attention_bias": False, "projectors_bias": False},
    absent={"num_key_value_heads": 8, "mamba_d_ssm": 1024, "mamba_n_groups": 1,
            "mamba_d_state": 256, "mamba_d_conv": 4, "mamba_norm_before_gate": True},
)  # fmt: skip
