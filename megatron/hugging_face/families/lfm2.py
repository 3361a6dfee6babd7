"""LFM2: gated short convolutions in most layers, attention with normed heads in the others.

With experts the router divides sigmoid scores by their sum. Transformers adds 1e-6 to the sum, and
this project 1e-20: weights of experts differ by about 1e-6 of their value.
"""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

from megatron.hugging_face.config_fields import ConfigFields
from megatron.hugging_face.families.experts import by_mlp, expert_rules
from megatron.hugging_face.families.llama import LLAMA
from megatron.hugging_face.model_description import ModelDescription
from megatron.hugging_face.weight_map import WeightRule, by_block, identity, renamed

_LAYER, _HF = "decoder.layers.{}.", "model.layers.{}."
_KINDS = "full_attention", "conv"
_NAMES = {
    "input_layernorm": "operator_norm", "post_attention_layernorm": "ffn_norm",
    "self_attn.o_proj": "self_attn.out_proj", ".q_norm": ".q_layernorm", ".k_norm": ".k_layernorm",
    "mlp.gate_proj": "feed_forward.w1", "mlp.up_proj": "feed_forward.w3",
    "mlp.down_proj": "feed_forward.w2", "model.norm.": "model.embedding_norm.",
}  # fmt: skip
_OF_EXPERTS = {
    "num_experts": "num_moe_experts", "num_experts_per_tok": "moe_router_topk",
    "moe_intermediate_size": "moe_ffn_hidden_size",
    "routed_scaling_factor": "moe_router_topk_scaling_factor",
    "use_expert_bias": "moe_router_enable_expert_bias",
}  # fmt: skip


def _settings(config: ConfigFields) -> ModelDescription:
    usual = config.renamed({"norm_eps": "rms_norm_eps"})
    layers = config.take("num_hidden_layers")
    attending = config.take("full_attn_idxs", range(layers))
    listed = [_KINDS[layer not in attending] for layer in range(layers)]
    kinds = config.take("layer_types", listed)
    if set(kinds) - set(_KINDS):
        config.only("layer_types", *_KINDS)
    return replace(
        LLAMA.settings(usual),
        qk_layernorm=True,
        experimental_attention_variant="short_conv",
        linear_attention_freq=[int(kind == _KINDS[1]) for kind in kinds],
        linear_conv_kernel_dim=config.take("conv_L_cache"),
    )


def _dense_settings(config: ConfigFields) -> ModelDescription:
    """Return the settings; the stated width of the MLP may have to be adjusted."""
    width = config.stated("block_ff_dim") or config.take("intermediate_size")
    multiplier = config.take("block_ffn_dim_multiplier", None)
    multiple = config.take("block_multiple_of")
    if config.take("block_auto_adjust_ff_dim"):
        width = int(2 * width / 3)
        if multiplier is not None:
            width = math.ceil(int(multiplier * width) / multiple) * multiple
    tied = config.stated("tie_embedding")
    fields = {"intermediate_size": width}
    if tied is not None:
        fields["tie_word_embeddings"] = tied
    return _settings(config.with_fields(fields))


def _fields(settings: ModelDescription) -> dict[str, Any]:
    fields = LLAMA.fields(settings)
    fields["norm_eps"] = fields.pop("rms_norm_eps")
    del fields["head_dim"], fields["attention_dropout"]
    return {
        **fields,
        "layer_types": [_KINDS[kind.is_recurrent] for kind in settings.layer_kinds],
        "conv_L_cache": settings.linear_conv_kernel_dim,
        "block_auto_adjust_ff_dim": False,
    }


def _rules(settings: ModelDescription) -> list[WeightRule]:
    """Return the rules of both kinds of layers; Megatron orders B, C and x by block of channels."""
    recurrent = settings.layers_where(lambda kind: kind.is_recurrent)
    attending = settings.layers_where(lambda kind: not kind.is_recurrent)
    width, here, there = settings.hidden_size, _LAYER + "self_attention.", _HF + "conv."
    blocks = math.gcd(width, settings.num_attention_heads)
    of_convolution = [
        identity(here + "in_proj.layer_norm_weight", _HF + "operator_norm.weight"),
        by_block(here + "in_proj.weight", blocks, {there + "in_proj.weight": (width,) * 3}),
        identity(here + "conv1d.weight", there + "conv.weight"),
        identity(here + "out_proj.weight", there + "out_proj.weight"),
    ]
    return [
        *(
            replace(rule, layers=attending) if "self_attention" in rule.megatron_name else rule
            for rule in renamed(LLAMA.rules(settings), _NAMES)
        ),
        *(replace(rule, layers=recurrent) for rule in of_convolution),
    ]


def _moe_settings(config: ConfigFields) -> ModelDescription:
    tied = config.stated("tie_embedding")
    if tied is not None:
        config = config.with_fields({"tie_word_embeddings": tied})
    dense, first = _settings(config), config.take("num_dense_layers")
    return replace(
        dense,
        **config.take_all(_OF_EXPERTS),
        moe_layer_freq=[int(layer >= first) for layer in range(dense.num_layers)],
        moe_router_score_function="sigmoid",
        moe_router_dtype="fp32",
    )


def _moe_fields(settings: ModelDescription) -> dict[str, Any]:
    fields = _fields(settings)
    del fields["block_auto_adjust_ff_dim"]
    own = settings.fields(_OF_EXPERTS) | {"moe_intermediate_size": settings.experts_width}
    return {**fields, **own, "num_dense_layers": settings.has_experts.count(False)}


def _moe_rules(settings: ModelDescription) -> list[WeightRule]:
    experts = renamed(expert_rules(settings, "feed_forward", "w1", "w3", "w2"), _NAMES)
    if settings.moe_router_enable_expert_bias:
        bias = identity(_LAYER + "mlp.router.expert_bias", _HF + "feed_forward.expert_bias")
        experts.append(bias)
    return by_mlp(_rules(settings), experts, settings)


LFM2 = replace(
    LLAMA,
    model_type="lfm2",
    architecture="Lfm2ForCausalLM",
    settings=_dense_settings,
    fields=_fields,
    rules=_rules,
    only={"conv_bias": False},
    # Initial values, and fields of older files that repeat others or have one value.
    unused=("block_dim", "block_mlp_init_scale", "block_norm_eps", "block_out_init_scale",
            "block_use_swiglu", "block_use_xavier_init", "conv_dim", "conv_dim_out",
            "conv_use_xavier_init", "num_heads", "use_pos_enc", "theta"),
    absent={"num_key_value_heads": 8, "norm_eps": 1e-5, "conv_L_cache": 3, "rope_theta": 1e6,
            "tie_word_embeddings": True, "block_multiple_of": 256, "block_ffn_dim_multiplier": 1.0,
            "block_auto_adjust_ff_dim": True},
)  # fmt: skip
LFM2_MOE = replace(
    LFM2,
    model_type="lfm2_moe",
    architecture="Lfm2MoeForCausalLM",
    settings=_moe_settings,
    fields=_moe_fields,
    rules=_moe_rules,
    only={"conv_bias": False, "norm_topk_prob": True},
    unused=(*LFM2.unused, "output_router_logits"),
    absent={"num_key_value_heads": 8, "norm_eps": 1e-5, "conv_L_cache": 3, "rope_theta": 1e6,
            "tie_word_embeddings": True, "num_dense_layers": 2, "num_experts": 32,
            "num_experts_per_tok": 4, "moe_intermediate_size": 1792, "routed_scaling_factor": 1.0,
            "use_expert_bias": True},
)  # fmt: skip
FAMILIES = (LFM2, LFM2_MOE)
