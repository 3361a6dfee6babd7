"""Gemma 4: layers of two widths and bases, values equal to keys, shared keys, vectors by layer.

Gemma Team, "Gemma 4" (model card and configs, 2026). Only the text models are supported: of a model
with images and sound (`gemma4`) the language model is read. In 26B-A4B the experts of a layer are a
branch beside its MLP.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from megatron.hugging_face.config_fields import ConfigFields
from megatron.hugging_face.families.family import (
    fields_of_layers,
    sizes_of_layers,
    window_fields,
    with_blocks,
    with_window,
)
from megatron.hugging_face.families.gemma import vector_rules, with_norms_around
from megatron.hugging_face.families.llama import LLAMA, gated_settings
from megatron.hugging_face.model_description import ModelDescription
from megatron.hugging_face.rope import FULL, SLIDING, rope_by_kind, rope_fields_by_kind
from megatron.hugging_face.weight_map import WeightRule, by_layer_size, identity, joined_experts

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
_EXPERTS = {"num_experts": "num_moe_experts", "top_k_experts": "moe_router_topk",
            "moe_intermediate_size": "moe_ffn_hidden_size"}  # fmt: skip
_WIDTHS = "ffn_hidden_size", "moe_shared_expert_intermediate_size"
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
    has_rotary = config.stated("rope_parameters") is not None
    rotary = rope_by_kind(model, config, dict.fromkeys(_ROTARY, {}) if has_rotary else _ROTARY)
    if any(m.rotary_percent != 1.0 and not m.rotary_proportional for m in rotary.values()):
        config.only("rope_parameters")
    serves_both = config.take("attention_k_eq_v", False)
    widest = {"head_dim": config.take("global_head_dim", 512)}
    if serves_both and (groups := config.take("num_global_key_value_heads", None)):
        widest["num_key_value_heads"] = groups
    usual = {str(n): widest for n in layers if not is_local[n]}
    own_sizes = sizes_of_layers(config, _SIZES, usual)
    has_experts = config.take("enable_moe_block", False)
    width, experts = _WIDTHS[has_experts], {}
    if has_experts:
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
    of_full = {"softmax_scale": 1.0, "attention_k_eq_v": serves_both}
    of_full |= rotary[FULL].fields({n: n for n in ("rotary_base", "rotary_percent")})
    is_wide = config.take("use_double_wide_mlp", False)
    return with_blocks(
        model,
        [({} if is_local[n] else of_full) | own_sizes(n) for n in layers],
        [{width: (1 + (is_wide and model.shares_key_value(n + 1))) * model.ffn_hidden_size}
         for n in layers],
    )  # fmt: skip


def _fields(model: ModelDescription) -> dict[str, Any]:
    fields = {**LLAMA.fields(model), **window_fields(model), **model.fields(_NAMES | _EXPERTS)}
    del fields["rope_theta"], fields["rope_scaling"]
    stated = {name for block in model.blocks for name in block.settings}
    return {
        **fields,
        **rope_fields_by_kind(model, _ROTARY),
        "intermediate_size": model.moe_shared_expert_intermediate_size or model.ffn_hidden_size,
        "enable_moe_block": model.num_moe_experts is not None,
        "attention_k_eq_v": "attention_k_eq_v" in stated,
        "use_double_wide_mlp": not stated.isdisjoint(_WIDTHS),
        "vocab_size_per_layer_input": model.unpadded_vocab_size,
        "per_layer_config": fields_of_layers(model, _SIZES),
    }


def _rules(model: ModelDescription) -> list[WeightRule]:
    rules = with_norms_around(LLAMA.rules(model)) + vector_rules(model)
    rules.append(identity(_MEGATRON + "layer_scalar", _HF + "layer_scalar"))
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
