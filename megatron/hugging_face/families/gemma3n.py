"""Gemma 3n: several residual streams, a branch of low rank, sparse activations, vectors by layer.

Gemma Team, "Gemma 3n" (model card and configs, 2025). Only the text model is supported: of a model
with images and sound (`gemma3n`) the language model is read.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from megatron.hugging_face.config_fields import ConfigFields
from megatron.hugging_face.families.family import window_fields, with_blocks, with_window
from megatron.hugging_face.families.gemma import vector_rules, with_norms_around
from megatron.hugging_face.families.llama import LLAMA, gated_settings
from megatron.hugging_face.model_description import ModelDescription
from megatron.hugging_face.rope import with_rope_by_window
from megatron.hugging_face.weight_map import WeightRule, by_layer_size, concat, identity

_MEGATRON, _HF = "decoder.layers.{}.", "model.layers.{}."
_SAME = ("final_logit_softcapping", "num_kv_shared_layers", "altup_num_inputs", "altup_active_idx",
         "altup_coef_clip", "laurel_rank")  # fmt: skip
_NAMES = {name: name for name in _SAME} | {"hidden_size_per_layer_input": "per_layer_embed_dim"}
_BY_LAYER = {
    "intermediate_size": "ffn_hidden_size", "activation_sparsity_pattern": "activation_sparsity",
}  # fmt: skip
_OF_STREAMS = {
    "alternating_updates.router": "altup.modality_router.weight",
    "alternating_updates.prediction": "altup.prediction_coefs.weight",
    "alternating_updates.correction": "altup.correction_coefs.weight",
    "alternating_updates.norm.weight": "altup.router_norm.weight",
    "per_layer_input.scale.weight": "altup.correct_output_scale",
    "laurel.left.weight": "laurel.linear_left.weight",
    "laurel.right.weight": "laurel.linear_right.weight",
    "laurel.norm.weight": "laurel.post_laurel_norm.weight",
}


def _settings(config: ConfigFields) -> ModelDescription:
    widths = config.take("intermediate_size")
    if isinstance(widths, int):
        widths = [widths] * config.take("num_hidden_layers")
    model = gated_settings(config.with_fields({"intermediate_size": widths[0]}))
    count, rows = model.num_layers, config.take("vocab_size_per_layer_input")
    if config.take("altup_num_inputs") < 2:
        config.only("altup_num_inputs", 2, 3, 4)
    model = replace(
        with_window(model, config, [(n + 1) % 5 != 0 for n in range(count)]),
        **config.take_all(_NAMES, altup_coef_clip=None, final_logit_softcapping=None),
        per_layer_vocab_size=rows if rows < model.unpadded_vocab_size else None,
        group_query_attention=True, geglu=True, sandwich_norm=True, qk_layernorm=True,
        v_l2_norm=True, softmax_scale=1.0, embedding_multiplier=model.hidden_size**0.5,
    )  # fmt: skip
    model = with_rope_by_window(
        model, config, base=1e6, local_base=1e4, local_base_name="rope_local_base_freq"
    )
    usual = [0.95 if n < 10 < count else 0.0 for n in range(count)]
    shares = config.take("activation_sparsity_pattern", usual)
    sizes = [dict(zip(_BY_LAYER.values(), own, strict=True))
             for own in zip(widths, shares, strict=True)]  # fmt: skip
    return with_blocks(model, [{}] * count, sizes)


def _fields(model: ModelDescription) -> dict[str, Any]:
    layers = [model.of_layer(n + 1).fields(_BY_LAYER) for n in range(model.num_layers)]
    return {
        **LLAMA.fields(model),
        **window_fields(model),
        **model.fields(_NAMES),
        "rope_local_base_freq": float(model.rotary_base_local or model.rotary_base),
        **{name: [layer[name] for layer in layers] for name in _BY_LAYER},
        "vocab_size_per_layer_input": model.per_layer_vocab_size or model.unpadded_vocab_size,
    }


def _rules(model: ModelDescription) -> list[WeightRule]:
    added = range(model.altup_num_inputs - 1)
    ends = {"expansion": "altup_projections", "contraction": "altup_unembed_projections"}
    return [
        *with_norms_around(LLAMA.rules(model)),
        *vector_rules(model),
        *(identity(_MEGATRON + here, _HF + there) for here, there in _OF_STREAMS.items()),
        *(concat(f"decoder.{here}.weight", *(f"model.{there}.{i}.weight" for i in added))
          for here, there in ends.items()),
    ]  # fmt: skip


GEMMA3N = replace(
    LLAMA,
    model_type="gemma3n_text",
    architecture="Gemma3nForCausalLM",
    settings=_settings,
    fields=_fields,
    rules=lambda model: by_layer_size(_rules, model),
    only={"hidden_activation": "gelu_pytorch_tanh", "attention_bias": False,
          "altup_correct_scale": True},
    absent={"num_key_value_heads": 2, "head_dim": 256, "sliding_window": 512,
            "tie_word_embeddings": True, "hidden_size_per_layer_input": 256,
            "vocab_size_per_layer_input": 262144, "final_logit_softcapping": 30.0,
            "altup_num_inputs": 4, "altup_active_idx": 0, "altup_coef_clip": 120.0,
            "laurel_rank": 64, "num_kv_shared_layers": 15},
)  # fmt: skip
