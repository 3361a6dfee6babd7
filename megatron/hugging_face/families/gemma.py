"""Gemma 2 and 3: norms before and after each branch, windows in most layers, bounded scores.

Gemma Team, "Gemma 2: Improving Open Language Models at a Practical Size", section 2, arXiv
2408.00118; "Gemma 3 Technical Report", section 2.1, arXiv 2503.19786. The text models; those of
Gemma 3 that see images (`gemma3`) are not built.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from megatron.hugging_face.config_fields import (
    ConfigFields,
    rope_parameters,
    rope_settings,
)
from megatron.hugging_face.families.family import Family, Settings
from megatron.hugging_face.families.llama import LLAMA, gated_settings
from megatron.hugging_face.families.windows import (
    FULL,
    SLIDING,
    window_fields,
    window_settings,
)
from megatron.hugging_face.weight_map import WeightRule, identity

_MEGATRON, _HF = "decoder.layers.{}.", "model.layers.{}."
_GEMMA3_GLOBAL_BASE, _GEMMA3_LOCAL_BASE, _GEMMA3_PERIOD = 1_000_000.0, 10_000.0, 6


def _common_settings(config: ConfigFields, period: int) -> dict[str, Any]:
    config.only("use_bidirectional_attention", False)
    config.only("attention_bias", False)
    for name in ("hidden_act", "hidden_activation"):
        config.only(name, "gelu_pytorch_tanh", "gelu_tanh")
    settings = gated_settings(config)
    layers = settings["num_layers"]
    return {
        **settings,
        "geglu": True,
        "untie_embeddings_and_output_weights": not config.take("tie_word_embeddings", True),
        "apply_layernorm_1p": True,
        "sandwich_norm": True,
        "embedding_multiplier": settings["hidden_size"] ** 0.5,
        "softmax_scale": config.take("query_pre_attn_scalar", 256) ** -0.5,
        "final_logit_softcapping": config.take("final_logit_softcapping", None),
        **window_settings(config, [(n + 1) % period != 0 for n in range(layers)]),
    }


def _common_fields(settings: Settings) -> dict[str, Any]:
    # Theirs is a whole number; the scale of ours is its inverse root, as nearly as floats can be.
    scale = settings.get("softmax_scale") or 256**-0.5
    fields = LLAMA.fields(settings)
    del fields["hidden_act"], fields["mlp_bias"]
    return {
        **fields,
        "hidden_activation": "gelu_pytorch_tanh",
        "query_pre_attn_scalar": round(scale**-2),
        **window_fields(settings),
        "final_logit_softcapping": settings.get("final_logit_softcapping"),
        "use_bidirectional_attention": False,
    }


def _gemma2_settings(config: ConfigFields) -> dict[str, Any]:
    return {
        **_common_settings(config, 2),
        "attn_logit_softcapping": config.take("attn_logit_softcapping", None),
        **rope_settings(config),
    }


def _gemma2_fields(settings: Settings) -> dict[str, Any]:
    cap = settings.get("attn_logit_softcapping")
    return {**_common_fields(settings), "attn_logit_softcapping": cap}


def _gemma3_settings(config: ConfigFields) -> dict[str, Any]:
    # Their Gemma 3 has the field, and does not bound its scores.
    config.take("attn_logit_softcapping", None)
    # Written by Transformers beside `layer_types`, which then says it.
    period = config.take("_sliding_window_pattern", _GEMMA3_PERIOD)
    period = config.take("sliding_window_pattern", period)
    settings = {**_common_settings(config, period), "qk_layernorm": True}
    by_kind = config.take("rope_parameters", {})
    full = dict(by_kind.get(FULL) or {}) | dict(config.take("rope_scaling", None) or {})
    local = dict(by_kind.get(SLIDING) or {})
    full.setdefault("rope_theta", config.take("rope_theta", _GEMMA3_GLOBAL_BASE))
    local.setdefault("rope_theta", config.take("rope_local_base_freq", _GEMMA3_LOCAL_BASE))
    local_settings = rope_parameters(local, f"rope_parameters of windows in {config.source}")
    rope = rope_parameters(full, f"rope_parameters in {config.source}")
    return {**settings, **rope, "rotary_base_local": local_settings["rotary_base"]}


def _gemma3_fields(settings: Settings) -> dict[str, Any]:
    local = settings.get("rotary_base_local") or settings["rotary_base"]
    return {**_common_fields(settings), "rope_local_base_freq": float(local)}


def _rules(settings: Settings) -> list[WeightRule]:
    """Those of Llama; its second norm is here after the attention, and two more follow."""
    before_mlp = _MEGATRON + "mlp.linear_fc1.layer_norm_weight"
    rules = [rule for rule in LLAMA.rules(settings) if rule.megatron_name != before_mlp]
    for here, there in (
        (before_mlp, "pre_feedforward_layernorm"),
        (_MEGATRON + "post_self_attn_layernorm.weight", "post_attention_layernorm"),
        (_MEGATRON + "post_mlp_layernorm.weight", "post_feedforward_layernorm"),
    ):
        rules.append(identity(here, f"{_HF}{there}.weight"))
    return rules


def _family(model_type: str, architecture: str, settings: Any, fields: Any) -> Family:
    return replace(
        LLAMA,
        model_type=model_type,
        architecture=architecture,
        settings=settings,
        fields=fields,
        rules=_rules,
    )


GEMMA2 = _family("gemma2", "Gemma2ForCausalLM", _gemma2_settings, _gemma2_fields)
GEMMA3 = _family("gemma3_text", "Gemma3ForCausalLM", _gemma3_settings, _gemma3_fields)
