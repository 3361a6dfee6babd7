"""Gemma: wide heads; Gemma 2 and 3: norms around each branch, windows, bounded scores.

Gemma Team, "Gemma 2: Improving Open Language Models at a Practical Size", section 2, arXiv
2408.00118; "Gemma 3 Technical Report", section 2.1, arXiv 2503.19786. Only the text models are
supported: of Gemma 3 with images (`gemma3`) the language model is read.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import Any

from megatron.hugging_face.config_fields import ConfigFields
from megatron.hugging_face.families.family import Family, window_fields, with_window
from megatron.hugging_face.families.llama import LLAMA, gated_settings
from megatron.hugging_face.model_description import ModelDescription
from megatron.hugging_face.rope import with_rope, with_rope_by_window
from megatron.hugging_face.weight_map import WeightRule, identity, vocabulary

_MEGATRON, _HF = "decoder.layers.{}.", "model.layers.{}."
_GEMMA3_GLOBAL_BASE, _GEMMA3_LOCAL_BASE, _GEMMA3_PERIOD = 1_000_000.0, 10_000.0, 6

_OF_VECTORS = {
    "per_layer_embedding.projection": "model.per_layer_model_projection",
    "per_layer_embedding.norm": "model.per_layer_projection_norm",
    _MEGATRON + "per_layer_input.gate": _HF + "per_layer_input_gate",
    _MEGATRON + "per_layer_input.projection": _HF + "per_layer_projection",
    _MEGATRON + "per_layer_input.norm": _HF + "post_per_layer_input_norm",
}


def _first_settings(config: ConfigFields) -> ModelDescription:
    for name in ("hidden_act", "hidden_activation"):
        config.only(name, "gelu_pytorch_tanh", "gelu_tanh")
    settings = gated_settings(config)
    return replace(
        settings,
        geglu=True,
        layernorm_zero_centered_gamma=True,
        embedding_multiplier=settings.hidden_size**0.5,
    )


def _gemma_fields(settings: ModelDescription) -> dict[str, Any]:
    names = {"hidden_act": "gelu_pytorch_tanh", "hidden_activation": None}
    return {**LLAMA.fields(settings), **names}


def _common_settings(config: ConfigFields, period: int) -> ModelDescription:
    settings = _first_settings(config)
    usual = [(n + 1) % period != 0 for n in range(settings.num_layers)]
    return replace(
        with_window(settings, config, usual),
        sandwich_norm=True,
        softmax_scale=config.take("query_pre_attn_scalar", 256) ** -0.5,
        final_logit_softcapping=config.take("final_logit_softcapping", None),
    )


def _common_fields(settings: ModelDescription) -> dict[str, Any]:
    # The field is an integer; `softmax_scale` is its inverse square root, up to rounding.
    scale = settings.softmax_scale or 256**-0.5
    return {
        **LLAMA.fields(settings),
        "hidden_activation": "gelu_pytorch_tanh",
        "query_pre_attn_scalar": round(scale**-2),
        **window_fields(settings),
        "final_logit_softcapping": settings.final_logit_softcapping,
    }


def _gemma2_settings(config: ConfigFields) -> ModelDescription:
    cap = config.take("attn_logit_softcapping", None)
    settings = replace(_common_settings(config, 2), attn_logit_softcapping=cap)
    return with_rope(settings, config)


def _gemma2_fields(settings: ModelDescription) -> dict[str, Any]:
    cap = settings.attn_logit_softcapping
    return {**_common_fields(settings), "attn_logit_softcapping": cap}


def _gemma3_settings(config: ConfigFields) -> ModelDescription:
    # Transformers' Gemma 3 has this field, but does not use it.
    config.take("attn_logit_softcapping", None)
    # Transformers writes this field together with `layer_types`, which overrides it.
    period = config.take("_sliding_window_pattern", _GEMMA3_PERIOD)
    period = config.take("sliding_window_pattern", period)
    settings = replace(_common_settings(config, period), qk_layernorm=True)
    return with_rope_by_window(
        settings,
        config,
        base=_GEMMA3_GLOBAL_BASE,
        local_base=_GEMMA3_LOCAL_BASE,
        local_base_name="rope_local_base_freq",
    )


def _gemma3_fields(settings: ModelDescription) -> dict[str, Any]:
    local = settings.rotary_base_local or settings.rotary_base
    return {**_common_fields(settings), "rope_local_base_freq": float(local)}


def with_norms_around(rules: Iterable[WeightRule]) -> list[WeightRule]:
    """Return Llama's rules, with norms before and after both the attention and the MLP."""
    before_mlp = _MEGATRON + "mlp.linear_fc1.layer_norm_weight"
    rules = [rule for rule in rules if rule.megatron_name != before_mlp]
    for here, there in (
        (before_mlp, "pre_feedforward_layernorm"),
        (_MEGATRON + "post_self_attn_layernorm.weight", "post_attention_layernorm"),
        (_MEGATRON + "post_mlp_layernorm.weight", "post_feedforward_layernorm"),
    ):
        rules.append(identity(here, f"{_HF}{there}.weight"))
    return rules


def vector_rules(model: ModelDescription) -> list[WeightRule]:
    """Return the rules of the vectors of layers (Gemma 3n and 4), if the model has them."""
    if not model.per_layer_embed_dim:
        return []
    table = "per_layer_embedding.embeddings.weight", "model.embed_tokens_per_layer.weight"
    return [vocabulary(*table, num_rows=model.per_layer_vocab_size)] + [
        identity(f"{here}.weight", f"{there}.weight") for here, there in _OF_VECTORS.items()
    ]


GEMMA = replace(
    LLAMA,
    model_type="gemma",
    architecture="GemmaForCausalLM",
    settings=lambda config: with_rope(_first_settings(config), config),
    fields=_gemma_fields,
    only={"use_bidirectional_attention": False, "attention_bias": False},
    absent={"num_key_value_heads": 16, "head_dim": 256, "tie_word_embeddings": True},
)


def _family(
    model_type: str,
    architecture: str,
    settings: Callable[[ConfigFields], ModelDescription],
    fields: Callable[[ModelDescription], dict[str, Any]],
    **absent: Any,
) -> Family:
    return replace(
        LLAMA,
        model_type=model_type,
        architecture=architecture,
        settings=settings,
        fields=fields,
        rules=lambda settings: with_norms_around(LLAMA.rules(settings)),
        only=GEMMA.only,
        absent={
            "num_key_value_heads": 4,
            "head_dim": 256,
            "sliding_window": 4096,
            "tie_word_embeddings": True,
            **absent,
        },
    )


GEMMA2 = _family("gemma2", "Gemma2ForCausalLM", _gemma2_settings, _gemma2_fields,
                 attn_logit_softcapping=50.0, final_logit_softcapping=30.0)  # fmt: skip
GEMMA3 = _family("gemma3_text", "Gemma3ForCausalLM", _gemma3_settings, _gemma3_fields)
