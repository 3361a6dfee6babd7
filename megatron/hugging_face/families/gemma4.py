"""Gemma 4: layers of two widths and bases, values equal to keys, shared keys, vectors by layer.

Gemma Team, "Gemma 4" (model card and configs, 2026). Only the text models are supported: of a model
with images and sound (`gemma4`) the language model is read. In 26B-A4B the experts of a layer are a
branch beside its MLP.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from megatron.hugging_face.config_fields import ConfigFields
from megatron.hugging_face.families.family import window_fields, with_blocks, with_window
from megatron.hugging_face.families.gemma import with_norms_around
from megatron.hugging_face.families.llama import LLAMA, gated_settings
from megatron.hugging_face.model_description import ModelDescription
from megatron.hugging_face.rope import FULL, SLIDING, rope_by_kind, rope_fields_by_kind
from megatron.hugging_face.weight_map import (
    WeightRule,
    by_layer_size,
    identity,
    joined_experts,
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
_EXPERTS = {
    "num_experts": "num_moe_experts",
    "top_k_experts": "moe_router_topk",
    "moe_intermediate_size": "moe_ffn_hidden_size",
}
_OF_VECTORS = {
    "per_layer_embedding.projection.": "model.per_layer_model_projection.",
    "per_layer_embedding.norm.": "model.per_layer_projection_norm.",
    _MEGATRON + "per_layer_input.gate.": _HF + "per_layer_input_gate.",
    _MEGATRON + "per_layer_input.projection.": _HF + "per_layer_projection.",
    _MEGATRON + "per_layer_input.norm.": _HF + "post_per_layer_input_norm.",
}
_OF_EXPERTS = {
    "router.weight": "router.proj.weight",
    "router.scale": "router.scale",
    "router.per_expert_scale": "router.per_expert_scale",
    "input_norm.weight": "pre_feedforward_layernorm_2.weight",
    "output_norm.weight": "post_feedforward_layernorm_2.weight",
    "shared_output_norm.weight": "post_feedforward_layernorm_1.weight",
}
_OF_DENSE = {
    "mlp.linear_fc1.layer_norm_": "mlp.shared_input_norm.",
    "mlp.linear_fc": "mlp.shared_experts.linear_fc",
}
"""Part of the name of a dense layer's parameter -> the name beside experts."""


def _settings(config: ConfigFields) -> ModelDescription:
    model = gated_settings(config)
    layers = range(model.num_layers)
    model = with_window(model, config, [(n + 1) % 6 != 0 for n in layers])
    is_local = [*model.windowed_layers[:-1], False]  # Transformers' last layer has no window
    rotary = rope_by_kind(model, config, _ROTARY)
    values = {"attention_k_eq_v": True} if config.take("attention_k_eq_v", False) else {}
    widest = {"head_dim": config.take("global_head_dim", 512)}
    if values and (groups := config.take("num_global_key_value_heads", None)):
        widest["num_key_value_heads"] = groups
    usual = {str(n): widest for n in layers if not is_local[n]}
    own = config.take("per_layer_config", usual)
    if {name for sizes in own.values() for name in sizes} - _SIZES.keys():
        config.only("per_layer_config")
    width = "ffn_hidden_size"
    experts: dict[str, Any] = {}
    if config.take("enable_moe_block", False):
        width = "moe_shared_expert_intermediate_size"
        experts = {**config.take_all(_EXPERTS), "moe_branch_norms": True, "moe_router_scales": True,
                   width: model.ffn_hidden_size}  # fmt: skip
    model = replace(
        rotary[SLIDING],
        **config.take_all(_NAMES, final_logit_softcapping=None, num_kv_shared_layers=0),
        **experts,
        window_attn_skip_freq=[int(has_it) for has_it in is_local],
        group_query_attention=True, geglu=True, sandwich_norm=True, qk_layernorm=True,
        v_l2_norm=True, layer_scalar=True, softmax_scale=1.0, rotary_proportional=True,
        embedding_multiplier=model.hidden_size**0.5,
    )  # fmt: skip
    if model.per_layer_embed_dim:
        config.only("vocab_size_per_layer_input", model.unpadded_vocab_size)
    full = rotary[FULL]
    of_full = {"softmax_scale": 1.0, "rotary_base": full.rotary_base,
               "rotary_percent": full.rotary_percent, **values}  # fmt: skip
    is_wide = config.take("use_double_wide_mlp", False)
    return with_blocks(
        model,
        [({} if is_local[n] else of_full)
         | {_SIZES[name]: size for name, size in own.get(str(n), {}).items()} for n in layers],
        [{width: (1 + (is_wide and model.shares_key_value(n + 1))) * model.ffn_hidden_size}
         for n in layers],
    )  # fmt: skip


def _fields(model: ModelDescription) -> dict[str, Any]:
    fields = {**LLAMA.fields(model), **window_fields(model), **model.fields(_NAMES | _EXPERTS)}
    del fields["rope_theta"], fields["rope_scaling"]
    own = [block.settings for block in model.blocks]
    widths = {"ffn_hidden_size", "moe_shared_expert_intermediate_size"}
    return {
        **fields,
        **rope_fields_by_kind(model, _ROTARY),
        "intermediate_size": model.moe_shared_expert_intermediate_size or model.ffn_hidden_size,
        "enable_moe_block": model.num_moe_experts is not None,
        "attention_k_eq_v": any("attention_k_eq_v" in settings for settings in own),
        "use_double_wide_mlp": any(widths & settings.keys() for settings in own),
        "vocab_size_per_layer_input": model.unpadded_vocab_size,
        "per_layer_config": {
            str(n): {name: settings[mine] for name, mine in _SIZES.items() if mine in settings}
            for n, settings in enumerate(own)
        },
    }


def _rules(model: ModelDescription) -> list[WeightRule]:
    rules = with_norms_around(LLAMA.rules(model))
    rules.append(identity(_MEGATRON + "layer_scalar", _HF + "layer_scalar"))
    if model.per_layer_embed_dim:
        table = "per_layer_embedding.embeddings.weight", "model.embed_tokens_per_layer.weight"
        rules.append(vocabulary(*table))
        rules += [identity(a + "weight", b + "weight") for a, b in _OF_VECTORS.items()]
    if model.num_moe_experts:
        for dense, beside in _OF_DENSE.items():
            rules = [replace(rule, megatron_name=rule.megatron_name.replace(dense, beside))
                     for rule in rules]  # fmt: skip
        rules += [identity(f"{_MEGATRON}mlp.{a}", _HF + b) for a, b in _OF_EXPERTS.items()]
        tensors = [f"{_HF}experts.{part}_proj" for part in ("gate_up", "down")]
        rules += joined_experts(model.num_moe_experts, *tensors)
    return rules


GEMMA4 = replace(
    LLAMA,
    model_type="gemma4_text",
    architecture="Gemma4ForCausalLM",
    settings=_settings,
    fields=_fields,
    rules=lambda model: by_layer_size(_rules, model),
    only={"hidden_activation": "gelu_pytorch_tanh", "attention_bias": False,
          "use_bidirectional_attention": None},
    unused=("top_k_experts", "num_experts", "moe_intermediate_size", "vocab_size_per_layer_input"),
    absent={"num_key_value_heads": 4, "head_dim": 256, "sliding_window": 512,
            "tie_word_embeddings": True, "hidden_size_per_layer_input": 256,
            "vocab_size_per_layer_input": 262144},
)  # fmt: skip
