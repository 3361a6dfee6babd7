"""Llama and similar models: RMSNorm, rotary positions, SwiGLU, grouped key/value heads.

Mistral adds a sliding window, Qwen 2 biases on query, key and value, Qwen 3 norms on query and
key heads.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from megatron.hugging_face.config_fields import ConfigFields
from megatron.hugging_face.families.family import SIZES, Family
from megatron.hugging_face.model_description import ModelDescription
from megatron.hugging_face.rope import rope_fields, with_rope
from megatron.hugging_face.weight_map import (
    WeightRule,
    concat,
    identity,
    query_key_value,
    vocabulary,
)

_LAYER, _HF = "decoder.layers.{}.", "model.layers.{}."
_NAMES = SIZES | {"rms_norm_eps": "layernorm_epsilon"}


def gated_settings(config: ConfigFields) -> ModelDescription:
    """Return the settings that all models with RMSNorm and a gated MLP share."""
    same = config.take_all(_NAMES)
    heads = same["num_attention_heads"]
    groups = config.take("num_key_value_heads", heads)
    return ModelDescription(
        **same,
        group_query_attention=groups != heads,
        num_query_groups=groups,
        kv_channels=config.take("head_dim", same["hidden_size"] // heads),
        untie_embeddings_and_output_weights=not config.take("tie_word_embeddings", False),
        normalization="RMSNorm",
        add_bias_linear=False,
        hidden_dropout=0.0,
        attention_dropout=config.take("attention_dropout", 0.0),
    )


def _settings(config: ConfigFields) -> ModelDescription:
    return with_rope(replace(gated_settings(config), swiglu=True), config)


def _fields(settings: ModelDescription) -> dict[str, Any]:
    return {
        **settings.fields(_NAMES),
        "num_key_value_heads": settings.num_key_value_heads,
        "head_dim": settings.head_dim,
        "attention_dropout": 0.0,
        "tie_word_embeddings": not settings.untie_embeddings_and_output_weights,
        **rope_fields(settings),
    }


def _rules(settings: ModelDescription) -> list[WeightRule]:
    attention, hf_prefix = _LAYER + "self_attention.", _HF + "self_attn."
    rules = [
        vocabulary("embedding.word_embeddings.weight", "model.embed_tokens.weight"),
        identity(attention + "linear_qkv.layer_norm_weight", _HF + "input_layernorm.weight"),
        projections("weight", settings.projections),
        identity(attention + "linear_proj.weight", hf_prefix + "o_proj.weight"),
        identity(
            _LAYER + "mlp.linear_fc1.layer_norm_weight",
            _HF + "post_attention_layernorm.weight",
        ),
        concat(
            _LAYER + "mlp.linear_fc1.weight",
            _HF + "mlp.gate_proj.weight",
            _HF + "mlp.up_proj.weight",
        ),
        identity(_LAYER + "mlp.linear_fc2.weight", _HF + "mlp.down_proj.weight"),
        identity("decoder.final_layernorm.weight", "model.norm.weight"),
    ]
    if settings.add_qkv_bias:
        rules.append(projections("bias", settings.projections))
    if settings.qk_layernorm:
        rules.append(identity(attention + "q_layernorm.weight", hf_prefix + "q_norm.weight"))
        if "k" in settings.projections:
            rules.append(identity(attention + "k_layernorm.weight", hf_prefix + "k_norm.weight"))
    if settings.untie_embeddings_and_output_weights:
        rules.append(vocabulary("output_layer.weight", "lm_head.weight"))
    return rules


def projections(kind: str, parts: str = "qkv") -> WeightRule:
    """Return the rule of the weights or biases of queries, keys and values."""
    names = [f"{_HF}self_attn.{part}_proj.{kind}" for part in parts]
    return query_key_value(f"{_LAYER}self_attention.linear_qkv.{kind}", *names)


def _mistral_settings(config: ConfigFields) -> ModelDescription:
    window = config.take("sliding_window", None)
    settings = _settings(config)
    return settings if window is None else replace(settings, window_size=(window - 1, 0))


def _mistral_fields(settings: ModelDescription) -> dict[str, Any]:
    window = settings.window_size
    return {**_fields(settings), "sliding_window": None if window is None else window[0] + 1}


def _qwen_settings(config: ConfigFields) -> ModelDescription:
    kinds = config.take("layer_types", [])
    if any(kind != "full_attention" for kind in kinds):
        config.only("layer_types", "full_attention")
    return _settings(config)


GATED = {"hidden_act": "silu", "mlp_bias": False}
LLAMA = Family(
    model_type="llama",
    architecture="LlamaForCausalLM",
    settings=_settings,
    fields=_fields,
    rules=_rules,
    only={**GATED, "attention_bias": False},
    without_meaning=(r".*rotary_emb\.inv_freq",),
)
MISTRAL = replace(
    LLAMA,
    model_type="mistral",
    architecture="MistralForCausalLM",
    settings=_mistral_settings,
    fields=_mistral_fields,
    only=GATED,
    absent={"num_key_value_heads": 8, "sliding_window": 4096},
)
QWEN2 = replace(
    LLAMA,
    model_type="qwen2",
    architecture="Qwen2ForCausalLM",
    settings=lambda config: replace(_qwen_settings(config), add_qkv_bias=True),
    only={**GATED, "use_sliding_window": False},
    unused=("sliding_window", "max_window_layers"),  # of the switch that is off
    absent={"num_key_value_heads": 32},
)
QWEN3 = replace(
    QWEN2,
    model_type="qwen3",
    architecture="Qwen3ForCausalLM",
    settings=lambda config: replace(_qwen_settings(config), qk_layernorm=True),
    only={**QWEN2.only, "attention_bias": False},
    absent={"num_key_value_heads": 32, "head_dim": 128},
)
