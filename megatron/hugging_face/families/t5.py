"""T5: an encoder and a decoder with a ReLU and a tied head, or (T5 1.1) a gated GELU.

C. Raffel et al., "Exploring the Limits of Transfer Learning with a Unified Text-to-Text
Transformer", arXiv 1910.10683. N. Shazeer, "GLU Variants Improve Transformer", arXiv 2002.05202.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from megatron.hugging_face.config_fields import ConfigFields
from megatron.hugging_face.families.family import Family
from megatron.hugging_face.model_description import ModelDescription
from megatron.hugging_face.weight_map import (
    WeightRule,
    concat,
    identity,
    key_value,
    query_key_value,
    vocabulary,
)

_GATED, _RELU = "gated-gelu", "relu"
_NAMES = {
    "d_model": "hidden_size",
    "num_heads": "num_attention_heads",
    "d_ff": "ffn_hidden_size",
    "n_positions": "max_position_embeddings",
    "relative_attention_num_buckets": "relative_attention_num_buckets",
    "relative_attention_max_distance": "relative_attention_max_distance",
    "layer_norm_epsilon": "layernorm_epsilon",
    "dropout_rate": "hidden_dropout",
    "vocab_size": "unpadded_vocab_size",
}
"""Field -> setting."""
_DEFAULTS = {
    "n_positions": 512, "relative_attention_num_buckets": 32, "dropout_rate": 0.1,
    "relative_attention_max_distance": 128, "layer_norm_epsilon": 1e-6,
}  # fmt: skip


def _settings(config: ConfigFields) -> ModelDescription:
    num_encoder = config.take("num_layers")
    is_tied = config.take("tie_word_embeddings", True)
    kind = config.only("feed_forward_proj", _RELU, _GATED)
    return ModelDescription(
        architecture="t5",
        encoder_num_layers=num_encoder,
        num_layers=num_encoder + config.take("num_decoder_layers", num_encoder),
        **config.take_all(_NAMES, **_DEFAULTS),
        kv_channels=config.take("d_kv"),
        position_embedding_type="relative",
        normalization="RMSNorm",
        relu=kind != _GATED,
        geglu=kind == _GATED,
        add_bias_linear=False,
        softmax_scale=1.0,
        scale_t5_logits=config.take("scale_decoder_outputs", is_tied),
        untie_embeddings_and_output_weights=not is_tied,
        attention_dropout=config.take("dropout_rate", 0.1),
    )


def _fields(settings: ModelDescription) -> dict[str, Any]:
    num_encoder = settings.encoder_num_layers or 0
    return {
        "is_encoder_decoder": True,
        "num_layers": num_encoder,
        "num_decoder_layers": settings.num_layers - num_encoder,
        **settings.fields(_NAMES),
        "d_kv": settings.head_dim,
        "feed_forward_proj": _GATED if settings.geglu else _RELU,
        "scale_decoder_outputs": settings.scale_t5_logits,
        "tie_word_embeddings": not settings.untie_embeddings_and_output_weights,
    }


def _stack(settings: ModelDescription, stack: str) -> list[WeightRule]:
    """Return the rules of the encoder or the decoder."""
    is_decoder = stack == "decoder"
    ours, theirs = f"{stack}.layers.{{}}.", f"{stack}.block.{{}}.layer."
    mlp = f"{theirs}{1 + is_decoder}."
    attention = f"{theirs}0.SelfAttention."
    first = ["wi_0", "wi_1"] if settings.geglu else ["wi"]
    rules = [
        identity(
            f"{ours}self_attention.linear_qkv.layer_norm_weight", f"{theirs}0.layer_norm.weight"
        ),
        query_key_value(
            f"{ours}self_attention.linear_qkv.weight", *(f"{attention}{x}.weight" for x in "qkv")
        ),
        identity(f"{ours}self_attention.linear_proj.weight", f"{attention}o.weight"),
        identity(f"{ours}mlp.linear_fc1.layer_norm_weight", f"{mlp}layer_norm.weight"),
        concat(f"{ours}mlp.linear_fc1.weight", *(f"{mlp}DenseReluDense.{x}.weight" for x in first)),
        identity(f"{ours}mlp.linear_fc2.weight", f"{mlp}DenseReluDense.wo.weight"),
    ]
    if is_decoder:
        other, cross = f"{theirs}1.EncDecAttention.", f"{ours}cross_attention."
        rules += [
            identity(f"{ours}pre_cross_attn_layernorm.weight", f"{theirs}1.layer_norm.weight"),
            identity(f"{cross}linear_q.weight", f"{other}q.weight"),
            key_value(f"{cross}linear_kv.weight", f"{other}k.weight", f"{other}v.weight"),
            identity(f"{cross}linear_proj.weight", f"{other}o.weight"),
        ]
    num_encoder = settings.encoder_num_layers or 0
    count = settings.num_layers - num_encoder if is_decoder else num_encoder
    return [
        *(replace(rule, layers=tuple(range(count))) for rule in rules),
        identity(f"{stack}.final_layernorm.weight", f"{stack}.final_layer_norm.weight"),
        identity(
            f"{stack}_relative_pos_emb.relative_attention_bias.weight",
            f"{stack}.block.0.layer.0.SelfAttention.relative_attention_bias.weight",
        ),
    ]


def _rules(settings: ModelDescription) -> list[WeightRule]:
    rules = [vocabulary("embedding.word_embeddings.weight", "shared.weight")]
    rules += _stack(settings, "encoder") + _stack(settings, "decoder")
    if settings.untie_embeddings_and_output_weights:
        rules.append(vocabulary("output_layer.weight", "lm_head.weight"))
    return rules


T5 = Family(
    model_type="t5",
    architecture="T5ForConditionalGeneration",
    settings=_settings,
    fields=_fields,
    rules=_rules,
    # The first two follow from the kind of MLP.
    unused=("dense_act_fn", "is_gated_act", "initializer_factor", "classifier_dropout"),
    copies={f"{stack}.embed_tokens.weight": "shared.weight" for stack in ("encoder", "decoder")},
    without_meaning=(
        r"decoder\.block\.0\.layer\.1\.EncDecAttention\.relative_attention_bias\.weight",
    ),
)
