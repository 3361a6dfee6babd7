"""GPT-NeoX and Pythia: attention and MLP side by side, LayerNorm, biases, partly rotated heads."""

from __future__ import annotations

from typing import Any

from megatron.hugging_face.config_fields import ConfigFields
from megatron.hugging_face.families.family import SIZES, Family
from megatron.hugging_face.model_description import ModelDescription
from megatron.hugging_face.rope import with_rope
from megatron.hugging_face.weight_map import WeightRule, vocabulary, weight_and_bias

_ACTIVATIONS = {"gelu": False, "gelu_new": True, "gelu_fast": True, "gelu_pytorch_tanh": True}
"""Name -> whether GELU uses the tanh approximation."""
_NAMES = SIZES | {
    "layer_norm_eps": "layernorm_epsilon",
    "use_parallel_residual": "use_parallel_residual",
}


def _settings(config: ConfigFields) -> ModelDescription:
    activation = config.only("hidden_act", *_ACTIVATIONS)
    model = ModelDescription(
        **config.take_all(_NAMES, layer_norm_eps=1e-5, use_parallel_residual=True),
        openai_gelu=_ACTIVATIONS.get(activation or "gelu", False),
        untie_embeddings_and_output_weights=not config.take("tie_word_embeddings", False),
        hidden_dropout=config.take("hidden_dropout", 0.0),
        attention_dropout=config.take("attention_dropout", 0.0),
    )
    return with_rope(model, config, base_name="rotary_emb_base", percent_name="rotary_pct")


def _fields(settings: ModelDescription) -> dict[str, Any]:
    return {
        **settings.fields(_NAMES),
        "hidden_act": "gelu_fast" if settings.openai_gelu else "gelu",
        "rotary_pct": settings.rotary_percent,
        "rotary_emb_base": float(settings.rotary_base),
        "tie_word_embeddings": not settings.untie_embeddings_and_output_weights,
    }


def _rules(settings: ModelDescription) -> list[WeightRule]:
    megatron_prefix, hf_prefix = "decoder.layers.{}.", "layers.{}."
    rules = [vocabulary("embedding.word_embeddings.weight", "embed_in.weight")]
    for here, there in (
        (megatron_prefix + "self_attention.linear_qkv.layer_norm_", hf_prefix + "input_layernorm"),
        # Both fused projections have the query, key and value of one head after another.
        (megatron_prefix + "self_attention.linear_qkv.", hf_prefix + "attention.query_key_value"),
        (megatron_prefix + "self_attention.linear_proj.", hf_prefix + "attention.dense"),
        (megatron_prefix + "mlp.linear_fc1.layer_norm_", hf_prefix + "post_attention_layernorm"),
        (megatron_prefix + "mlp.linear_fc1.", hf_prefix + "mlp.dense_h_to_4h"),
        (megatron_prefix + "mlp.linear_fc2.", hf_prefix + "mlp.dense_4h_to_h"),
        ("decoder.final_layernorm.", "final_layer_norm"),
    ):
        rules += weight_and_bias(here, there)
    if settings.untie_embeddings_and_output_weights:
        rules.append(vocabulary("output_layer.weight", "/embed_out.weight"))
    return rules


GPT_NEOX = Family(
    model_type="gpt_neox",
    architecture="GPTNeoXForCausalLM",
    settings=_settings,
    fields=_fields,
    rules=_rules,
    only={"attention_bias": True},
    unused=("classifier_dropout",),
    absent={"partial_rotary_factor": 0.25},
    prefixes=("gpt_neox.", ""),
    without_meaning=(r"layers\.\d+\.attention\.(bias|masked_bias|rotary_emb\.inv_freq)",),
)
