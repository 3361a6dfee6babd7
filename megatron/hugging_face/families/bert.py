"""BERT, an encoder with norms after each residual connection; `megatron-bert` with norms before.

J. Devlin et al., "BERT", arXiv 1810.04805. With `apply_residual_connection_post_layernorm`, the
first norm of Megatron's layer i + 1 is the last norm of BERT's layer i, and the first norm of layer
0 is the norm of BERT's embedding. Without the head for pairs of texts, the pooler is left out.
"""

from __future__ import annotations

from typing import Any

from megatron.hugging_face.config_fields import ConfigFields
from megatron.hugging_face.families.family import SIZES, Family
from megatron.hugging_face.model_description import ModelDescription
from megatron.hugging_face.weight_map import (
    WeightRule,
    identity,
    query_key_value,
    vocabulary,
    weight_and_bias,
)

_LAYER, _HF = "encoder.layers.{}.", "encoder.layer.{}."
_ACTIVATIONS = {"gelu": False, "gelu_new": True, "gelu_pytorch_tanh": True}
"""Name -> whether GELU uses the tanh approximation."""
_NAMES = SIZES | {
    "layer_norm_eps": "layernorm_epsilon",
    "hidden_dropout_prob": "hidden_dropout",
    "attention_probs_dropout_prob": "attention_dropout",
}
_DEFAULTS = {
    "layer_norm_eps": 1e-12, "hidden_dropout_prob": 0.1, "attention_probs_dropout_prob": 0.1,
}  # fmt: skip


def _settings(config: ConfigFields, *, is_post_norm: bool, prefix: str) -> ModelDescription:
    architectures = config.take("architectures", [])
    activation = config.only("hidden_act", *_ACTIVATIONS)
    return ModelDescription(
        architecture="bert",
        bert_binary_head=f"{prefix}ForMaskedLM" not in architectures,
        **config.take_all(_NAMES, **_DEFAULTS),
        openai_gelu=_ACTIVATIONS.get(activation or "gelu", True),
        apply_residual_connection_post_layernorm=is_post_norm,
        untie_embeddings_and_output_weights=False,
    )


def _fields(settings: ModelDescription, prefix: str) -> dict[str, Any]:
    task = "PreTraining" if settings.bert_binary_head else "MaskedLM"
    return {
        "architectures": [f"{prefix}For{task}"],
        **settings.fields(_NAMES),
        "hidden_act": "gelu_new" if settings.openai_gelu else "gelu",
    }


def _post_norms(settings: ModelDescription) -> list[WeightRule]:
    """Return the norms of BERT: the last norm of its layer i is Megatron's first of layer i + 1."""
    last = settings.num_layers - 1
    rules = weight_and_bias(
        "encoder.layers.0.self_attention.linear_qkv.layer_norm_", "embeddings.LayerNorm"
    )
    for layer in range(last):
        rules += weight_and_bias(
            f"encoder.layers.{layer + 1}.self_attention.linear_qkv.layer_norm_",
            f"encoder.layer.{layer}.output.LayerNorm",
        )
    rules += weight_and_bias("encoder.final_layernorm.", f"encoder.layer.{last}.output.LayerNorm")
    return rules + weight_and_bias(
        _LAYER + "mlp.linear_fc1.layer_norm_", _HF + "attention.output.LayerNorm"
    )


def _pre_norms(_settings: ModelDescription) -> list[WeightRule]:
    """Return the norms of `megatron-bert`."""
    rules = weight_and_bias(_LAYER + "self_attention.linear_qkv.layer_norm_", _HF + "attention.ln")
    rules += weight_and_bias(_LAYER + "mlp.linear_fc1.layer_norm_", _HF + "ln")
    return rules + weight_and_bias("encoder.final_layernorm.", "encoder.ln")


def _rules(settings: ModelDescription, norms: list[WeightRule]) -> list[WeightRule]:
    rules = [
        vocabulary("embedding.word_embeddings.weight", "embeddings.word_embeddings.weight"),
        identity("embedding.position_embeddings.weight", "embeddings.position_embeddings.weight"),
        identity(
            "embedding.tokentype_embeddings.weight", "embeddings.token_type_embeddings.weight"
        ),
    ]
    for kind in ("weight", "bias"):
        parts = [f"{_HF}attention.self.{part}.{kind}" for part in ("query", "key", "value")]
        rules.append(query_key_value(f"{_LAYER}self_attention.linear_qkv.{kind}", *parts))
    rules += weight_and_bias(_LAYER + "self_attention.linear_proj.", _HF + "attention.output.dense")
    rules += weight_and_bias(_LAYER + "mlp.linear_fc1.", _HF + "intermediate.dense")
    rules += weight_and_bias(_LAYER + "mlp.linear_fc2.", _HF + "output.dense")
    rules += norms
    rules += weight_and_bias("lm_head.dense.", "/cls.predictions.transform.dense")
    rules += weight_and_bias("lm_head.layer_norm.", "/cls.predictions.transform.LayerNorm")
    rules.append(vocabulary("output_layer.bias", "/cls.predictions.bias"))
    if settings.bert_binary_head:
        rules += weight_and_bias("pooler.dense.", "pooler.dense")
        rules += weight_and_bias("binary_head.", "/cls.seq_relationship")
    return rules


def _family(model_type: str, prefix: str, *, is_post_norm: bool) -> Family:
    norms = _post_norms if is_post_norm else _pre_norms
    return Family(
        model_type=model_type,
        architecture=f"{prefix}ForPreTraining",
        settings=lambda config: _settings(config, is_post_norm=is_post_norm, prefix=prefix),
        fields=lambda settings: _fields(settings, prefix),
        rules=lambda settings: _rules(settings, norms(settings)),
        # The mask of a decoder is causal; an untied head has a second bias, without effect.
        only={
            "position_embedding_type": "absolute",
            "type_vocab_size": 2,
            "is_decoder": False,
            "tie_word_embeddings": True,
        },
        unused=("classifier_dropout",),
        prefixes=("bert.",),
        without_meaning=(r"embeddings\.position_ids",),
        copies={
            "/cls.predictions.decoder.weight": "embeddings.word_embeddings.weight",
            "/cls.predictions.decoder.bias": "/cls.predictions.bias",
        },
        left_out={
            r"bert\.pooler\..*": "the pooler",
            r"cls\.seq_relationship\..*": "the head for pairs of texts",
        },
    )


BERT = _family("bert", "Bert", is_post_norm=True)
MEGATRON_BERT = _family("megatron-bert", "MegatronBert", is_post_norm=False)
