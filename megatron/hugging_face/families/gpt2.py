"""GPT-2: learned positions, LayerNorm, biases, a fused projection stored [in, out].

StarCoder 1 (`gpt_bigcode`) differs in one key and value head for all queries, stored [out, in].
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from megatron.hugging_face.config_fields import ConfigFields
from megatron.hugging_face.families.family import Family
from megatron.hugging_face.model_description import ModelDescription
from megatron.hugging_face.weight_map import (
    WeightRule,
    fused_query_key_value,
    identity,
    transposed,
    vocabulary,
    weight_and_bias,
)

_ACTIVATIONS = {"gelu_new": True, "gelu_pytorch_tanh": True, "gelu": False}
"""Name -> whether GELU uses the tanh approximation."""
_NAMES = {
    "n_layer": "num_layers", "n_embd": "hidden_size", "n_head": "num_attention_heads",
    "n_positions": "max_position_embeddings", "layer_norm_epsilon": "layernorm_epsilon",
    "vocab_size": "unpadded_vocab_size",
}  # fmt: skip
"""Field -> setting."""
_UNUSED = (
    "embd_pdrop", "summary_activation", "summary_first_dropout",
    "summary_proj_to_labels", "summary_type", "summary_use_proj", "n_ctx", "n_special",
    "predict_special_tokens", "reorder_and_upcast_attn",
)  # fmt: skip


def _settings(config: ConfigFields) -> ModelDescription:
    activation = config.only("activation_function", *_ACTIVATIONS)
    same = config.take_all(_NAMES, layer_norm_epsilon=1e-5)
    return ModelDescription(
        **same,
        ffn_hidden_size=config.take("n_inner", 4 * same["hidden_size"]),
        openai_gelu=_ACTIVATIONS.get(activation or "gelu_new", True),
        position_embedding_type="learned_absolute",
        untie_embeddings_and_output_weights=not config.take("tie_word_embeddings", True),
        hidden_dropout=config.take("resid_pdrop", 0.1),
        attention_dropout=config.take("attn_pdrop", 0.1),
    )


def _fields(settings: ModelDescription) -> dict[str, Any]:
    return {
        **settings.fields(_NAMES),
        "n_inner": settings.ffn_hidden_size,
        "activation_function": "gelu_new" if settings.openai_gelu else "gelu",
        "tie_word_embeddings": not settings.untie_embeddings_and_output_weights,
    }


def _rules(settings: ModelDescription) -> list[WeightRule]:
    megatron_prefix, hf_prefix = "decoder.layers.{}.", "h.{}."
    rules = [
        vocabulary("embedding.word_embeddings.weight", "wte.weight"),
        identity("embedding.position_embeddings.weight", "wpe.weight"),
        fused_query_key_value(
            megatron_prefix + "self_attention.linear_qkv.weight",
            hf_prefix + "attn.c_attn.weight",
            is_transposed=True,
        ),
        fused_query_key_value(
            megatron_prefix + "self_attention.linear_qkv.bias", hf_prefix + "attn.c_attn.bias"
        ),
    ]
    for here, there in (
        ("self_attention.linear_proj", "attn.c_proj"),
        ("mlp.linear_fc1", "mlp.c_fc"),
        ("mlp.linear_fc2", "mlp.c_proj"),
    ):
        rules.append(transposed(f"{megatron_prefix}{here}.weight", f"{hf_prefix}{there}.weight"))
        rules.append(identity(f"{megatron_prefix}{here}.bias", f"{hf_prefix}{there}.bias"))
    rules += weight_and_bias(
        megatron_prefix + "self_attention.linear_qkv.layer_norm_", hf_prefix + "ln_1"
    )
    rules += weight_and_bias(megatron_prefix + "mlp.linear_fc1.layer_norm_", hf_prefix + "ln_2")
    rules += weight_and_bias("decoder.final_layernorm.", "ln_f")
    if settings.untie_embeddings_and_output_weights:
        rules.append(vocabulary("output_layer.weight", "/lm_head.weight"))
    return rules


def _bigcode_settings(config: ConfigFields) -> ModelDescription:
    config.only("num_key_value_heads", 1)
    settings = _settings(config)
    return replace(
        settings,
        group_query_attention=True,
        num_query_groups=1,
        kv_channels=settings.hidden_size // settings.num_attention_heads,
    )


def _bigcode_fields(settings: ModelDescription) -> dict[str, Any]:
    tanh = "gelu_pytorch_tanh" if settings.openai_gelu else "gelu"
    return {**_fields(settings), "activation_function": tanh}


GPT2 = Family(
    model_type="gpt2",
    architecture="GPT2LMHeadModel",
    settings=_settings,
    fields=_fields,
    rules=_rules,
    only={"scale_attn_weights": True, "scale_attn_by_inverse_layer_idx": False},
    unused=_UNUSED,
    prefixes=("transformer.", ""),
    without_meaning=(r"h\.\d+\.attn\.(masked_)?bias",),
)
GPT_BIGCODE = replace(
    GPT2,
    model_type="gpt_bigcode",
    architecture="GPTBigCodeForCausalLM",
    settings=_bigcode_settings,
    fields=_bigcode_fields,
    rules=lambda settings: [replace(rule, is_transposed=False) for rule in _rules(settings)],
    only={
        **GPT2.only,
        "multi_query": True,
        "attention_softmax_in_fp32": True,
        "scale_attention_softmax_in_fp32": True,
    },
)
