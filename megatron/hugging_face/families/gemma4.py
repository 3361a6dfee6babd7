"""Gemma 4: layers of two widths and bases, values equal to keys, shared keys, vectors by layer.

Gemma Team, "Gemma 4" (model card and configs, 2026). Only the text models are supported: of a model
with images and sound (`gemma4`) the language model is read. Layers of experts are refused.
"""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

from megatron.hugging_face.config_fields import ConfigFields
from megatron.hugging_face.families.family import window_fields, with_window
from megatron.hugging_face.families.gemma import with_norms_around
from megatron.hugging_face.families.llama import LLAMA, gated_settings
from megatron.hugging_face.model_description import ModelDescription
from megatron.hugging_face.rope import FULL, SLIDING, with_rope_parameters
from megatron.hugging_face.weight_map import (
    WeightRule,
    by_layer_size,
    identity,
    query_key_value,
    vocabulary,
)

_MEGATRON, _HF = "decoder.layers.{}.", "model.layers.{}."
_SIZES = {"head_dim": "kv_channels", "num_key_value_heads": "num_query_groups"}
_ROTARY = {
    SLIDING: {"rope_type": "default", "rope_theta": 1e4},
    FULL: {"rope_type": "proportional", "rope_theta": 1e6, "partial_rotary_factor": 0.25},
}
_NAMES = {
    "final_logit_softcapping": "final_logit_softcapping",
    "num_kv_shared_layers": "num_kv_shared_layers",
    "hidden_size_per_layer_input": "per_layer_embed_dim",
}


def _settings(config: ConfigFields) -> ModelDescription:
    model = gated_settings(config)
    layers = range(model.num_layers)
    model = with_window(model, config, [(n + 1) % 6 != 0 for n in layers])
    is_local = [*model.windowed_layers[:-1], False]  # Transformers' last layer has no window
    stated = config.take("rope_parameters", {})
    local, full = (
        with_rope_parameters(model, usual | (stated.get(kind) or {}), f"rope_parameters of {kind}")
        for kind, usual in _ROTARY.items()
    )
    serves_both = config.take("attention_k_eq_v", False)
    widest = {"head_dim": config.take("global_head_dim", 512)}
    if serves_both and (groups := config.take("num_global_key_value_heads", None)):
        widest["num_key_value_heads"] = groups
    usual_sizes = {str(n): widest for n in layers if not is_local[n]}
    own = config.take("per_layer_config", usual_sizes)
    if {name for sizes in own.values() for name in sizes} - _SIZES.keys():
        config.only("per_layer_config")
    model = replace(
        local,
        **config.take_all(_NAMES, final_logit_softcapping=None, num_kv_shared_layers=0),
        window_attn_skip_freq=[int(has_it) for has_it in is_local],
        group_query_attention=True, geglu=True, sandwich_norm=True, qk_layernorm=True,
        v_l2_norm=True, layer_scalar=True, softmax_scale=1.0, rotary_proportional=True,
        embedding_multiplier=model.hidden_size**0.5,
    )  # fmt: skip
    if model.per_layer_embed_dim:
        config.only("vocab_size_per_layer_input", model.unpadded_vocab_size)
    of_full = {"softmax_scale": 1.0, "rotary_base": full.rotary_base,
               "rotary_percent": full.rotary_percent}  # fmt: skip
    of_full |= {"attention_k_eq_v": True} if serves_both else {}
    is_wide = config.take("use_double_wide_mlp", False)
    blocks = [
        {
            "attention": ({} if is_local[n] else of_full)
            | {
                _SIZES[name]: size
                for name, size in own.get(str(n), {}).items()
                if size != getattr(model, _SIZES[name])
            },
            "ffn": {"ffn_hidden_size": 2 * model.ffn_hidden_size}
            if is_wide and model.shares_key_value(n + 1)
            else {},
        }
        for n in layers
    ]
    text = json.dumps({"block_configs": blocks})
    return replace(model, heterogeneous_layers_config_encoded_json=text)


def _fields(model: ModelDescription) -> dict[str, Any]:
    fields = {**LLAMA.fields(model), **window_fields(model), **model.fields(_NAMES)}
    del fields["rope_theta"], fields["rope_scaling"]
    blocks = [dict(block.settings) for block in model.blocks]
    base, percent = next(
        ((b["rotary_base"], b["rotary_percent"]) for b in blocks if "rotary_base" in b), (1e6, 0.25)
    )
    return {
        **fields,
        "rope_parameters": {
            SLIDING: _ROTARY[SLIDING] | {"rope_theta": float(model.rotary_base)},
            FULL: {**_ROTARY[FULL], "rope_theta": float(base), "partial_rotary_factor": percent},
        },
        "attention_k_eq_v": any("attention_k_eq_v" in block for block in blocks),
        "use_double_wide_mlp": any("ffn_hidden_size" in block for block in blocks),
        "vocab_size_per_layer_input": model.unpadded_vocab_size,
        "per_layer_config": {
            str(n): sizes
            for n, block in enumerate(blocks)
            if (sizes := {name: block[mine] for name, mine in _SIZES.items() if mine in block})
        },
    }


def _rules(model: ModelDescription) -> list[WeightRule]:
    rules = with_norms_around(LLAMA.rules(model))
    rules.append(identity(_MEGATRON + "layer_scalar", _HF + "layer_scalar"))
    packed, k_norm = (_MEGATRON + f"self_attention.{part}.weight"
                      for part in ("linear_qkv", "k_layernorm"))  # fmt: skip
    of_parts: dict[str, list[int]] = {"q": [], "qk": [], "qkv": []}
    for n in range(model.num_layers):
        parts = "qk" if model.of_layer(n + 1).attention_k_eq_v else "qkv"
        of_parts["q" if model.shares_key_value(n + 1) else parts].append(n)
    with_keys = tuple(of_parts["qk"] + of_parts["qkv"])
    rules = [
        replace(rule, layers=with_keys) if rule.megatron_name == k_norm else rule
        for rule in rules
        if rule.megatron_name != packed
    ]
    for parts, layers in of_parts.items():
        names = [f"{_HF}self_attn.{part}_proj.weight" for part in parts]
        rules.append(replace(query_key_value(packed, *names), layers=tuple(layers)))
    if model.per_layer_embed_dim:
        own, all_layers = _MEGATRON + "per_layer_input.", "per_layer_embedding."
        rules += [
            vocabulary(all_layers + "embeddings.weight", "model.embed_tokens_per_layer.weight"),
            identity(all_layers + "projection.weight", "model.per_layer_model_projection.weight"),
            identity(all_layers + "norm.weight", "model.per_layer_projection_norm.weight"),
            identity(own + "gate.weight", _HF + "per_layer_input_gate.weight"),
            identity(own + "projection.weight", _HF + "per_layer_projection.weight"),
            identity(own + "norm.weight", _HF + "post_per_layer_input_norm.weight"),
        ]
    return by_layer_size(rules, model)


GEMMA4 = replace(
    LLAMA,
    model_type="gemma4_text",
    architecture="Gemma4ForCausalLM",
    settings=_settings,
    fields=_fields,
    rules=_rules,
    only={"hidden_activation": "gelu_pytorch_tanh", "attention_bias": False,
          "enable_moe_block": False, "use_bidirectional_attention": None},
    unused=("top_k_experts", "num_experts", "moe_intermediate_size", "vocab_size_per_layer_input"),
    absent={"num_key_value_heads": 4, "head_dim": 256, "sliding_window": 512,
            "tie_word_embeddings": True, "hidden_size_per_layer_input": 256,
            "vocab_size_per_layer_input": 262144},
)  # fmt: skip
