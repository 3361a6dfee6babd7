"""Qwen3-Next, Qwen3.5 and Lara 4 Mini: Gated DeltaNet in most layers, attention in the others.

Qwen3-Next and `qwen3_5_moe_text` have experts in all layers, `qwen3_5_text` in none. Attention has
gates. Norms are zero-centred, except the norms of recurrent heads; a part of each attention head
rotates. `qwen_vl` adds the encoder of images of Qwen3.5 and 3.6.

Lara 4 Mini (Translated, model card, 2026; `lara_mini`) has experts in all layers, plain norms and
no gates. Its layers of attention have windows, or no window and no rotation.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from itertools import cycle, islice
from typing import Any

from megatron.hugging_face.config_fields import ConfigFields
from megatron.hugging_face.families.experts import (
    ALL_SPARSE,
    OF_BALANCE,
    by_mlp,
    expert_rules,
    with_shared_expert,
)
from megatron.hugging_face.families.family import Family, window_fields
from megatron.hugging_face.families.llama import QWEN3, gated_settings
from megatron.hugging_face.model_description import ModelDescription
from megatron.hugging_face.rope import FULL, SLIDING, rope_parameters, with_rope
from megatron.hugging_face.weight_map import (
    WeightRule,
    by_block,
    gated_query_key_value,
    identity,
    joined_experts,
    renamed,
    with_others,
)

_MEGATRON, _HF = "decoder.layers.{}.", "model.layers.{}."
_KINDS = (FULL, "linear_attention")
_LARA_KINDS = ("linear_attention", SLIDING, "linear_attention", FULL, SLIDING)
"""Kinds of the layers of Lara, in turn."""
_SIZES = {
    "linear_conv_kernel_dim": 4, "linear_key_head_dim": 128, "linear_value_head_dim": 128,
    "linear_num_key_heads": 16, "linear_num_value_heads": 32,
}  # fmt: skip
"""Name of a size, the same in Megatron -> its default."""
_OF_IMAGES = ("mrope_section", "mrope_interleaved")
"""Fields of positions that are without effect on text."""
_GATED = {"hidden_act": "silu", "attention_bias": False}
_LATER_TOKENS = {r"mtp\..*": "the layers that predict later tokens"}


def _recurrent_settings(config: ConfigFields) -> ModelDescription:
    return replace(
        gated_settings(config),
        swiglu=True,
        qk_layernorm=True,
        experimental_attention_variant="gated_delta_net",
        **{name: config.take(name, config.absent.get(name, size)) for name, size in _SIZES.items()},
    )


def _dense_settings(config: ConfigFields) -> ModelDescription:
    interval = config.take("full_attention_interval", 4)
    kinds = config.take("layer_types", None)
    if kinds is not None and set(kinds) - set(_KINDS):
        config.only("layer_types", *_KINDS)
    model = replace(
        _recurrent_settings(config),
        layernorm_zero_centered_gamma=True,
        attention_output_gate=True,
        linear_attention_freq=interval if kinds is None else [_KINDS.index(k) for k in kinds],
    )
    rope = rope_parameters(config)
    for name in _OF_IMAGES:
        rope.pop(name, None)
    return with_rope(model, config.without("rope_scaling").with_fields({"rope_parameters": rope}))


def _with_experts(dense: ModelDescription, config: ConfigFields) -> ModelDescription:
    return replace(
        dense,
        num_moe_experts=config.take("num_experts"),
        moe_router_topk=config.take("num_experts_per_tok"),
        moe_ffn_hidden_size=config.take("moe_intermediate_size"),
        moe_router_pre_softmax=not config.take("norm_topk_prob", True),
        moe_shared_expert_intermediate_size=config.take("shared_expert_intermediate_size"),
    )


def _settings(config: ConfigFields) -> ModelDescription:
    return replace(_with_experts(_dense_settings(config), config), moe_shared_expert_gate=True)


def _moe_settings(config: ConfigFields) -> ModelDescription:
    config.take("intermediate_size", None)  # there is no dense layer
    usual = {"intermediate_size": config.take("moe_intermediate_size"), "norm_topk_prob": True}
    config.only("norm_topk_prob", True)
    return _settings(config.with_fields(usual))


def _lara_settings(config: ConfigFields) -> ModelDescription:
    # There is no dense layer.
    usual = config.with_fields({"intermediate_size": config.take("moe_intermediate_size")})
    model = with_rope(_with_experts(_recurrent_settings(usual), usual), usual)
    usually = islice(cycle(_LARA_KINDS), model.num_layers)
    kinds = config.take("layer_types", None) or list(usually)
    if set(kinds) - set(_LARA_KINDS):
        config.only("layer_types", *_LARA_KINDS)
    return replace(
        model,
        linear_attention_freq=[int(kind == _KINDS[1]) for kind in kinds],
        window_size=(config.take("sliding_window") - 1, 0),
        window_attn_skip_freq=[int(kind == SLIDING) for kind in kinds],
        no_rope_freq=[int(kind == FULL) for kind in kinds],
    )


def _dense_fields(settings: ModelDescription) -> dict[str, Any]:
    return {
        **QWEN3.fields(settings),
        "partial_rotary_factor": settings.rotary_percent,
        "layer_types": [_KINDS[kind.is_recurrent] for kind in settings.layer_kinds],
        **{name: getattr(settings, name) for name in _SIZES},
    }


def _fields(settings: ModelDescription) -> dict[str, Any]:
    return {
        **_dense_fields(settings),
        "num_experts": settings.num_moe_experts or 1,
        "num_experts_per_tok": settings.moe_router_topk,
        "moe_intermediate_size": settings.experts_width,
        "norm_topk_prob": not settings.moe_router_pre_softmax,
        "shared_expert_intermediate_size": settings.moe_shared_expert_intermediate_size or 0,
    }


def _lara_fields(settings: ModelDescription) -> dict[str, Any]:
    fields = {**_fields(settings), **window_fields(settings)}
    del fields["intermediate_size"], fields["partial_rotary_factor"]
    for layer in settings.layers_where(lambda kind: kind.is_recurrent):
        fields["layer_types"][layer] = _KINDS[1]
    return fields


_Runs = Callable[[int, int, int], dict[str, tuple[int, ...]]]
"""(rows of keys, of values, of heads) -> projection before the recurrence -> its runs of rows."""


def _fused(keys: int, values: int, heads: int) -> dict[str, tuple[int, ...]]:
    return {"in_proj_qkvz": (2 * keys + 2 * values,), "in_proj_ba": (2 * heads,)}


def _apart(keys: int, values: int, heads: int) -> dict[str, tuple[int, ...]]:
    return {
        "in_proj_qkv": (keys, keys, values),
        "in_proj_z": (values,),
        "in_proj_b": (heads,),
        "in_proj_a": (heads,),
    }


def _joined(keys: int, values: int, heads: int) -> dict[str, tuple[int, ...]]:
    return {"in_proj": (keys, keys, values, values, heads, heads)}


def _rules(settings: ModelDescription, runs: _Runs) -> list[WeightRule]:
    projections = [f"{_HF}self_attn.{part}_proj.weight" for part in "qkv"]
    gated = gated_query_key_value(f"{_MEGATRON}self_attention.linear_qkv.weight", *projections)
    dense = _mixed_rules(with_others(QWEN3.rules(settings), gated), settings, runs)
    experts = expert_rules(settings, "mlp", "gate_proj", "up_proj", "down_proj")
    return by_mlp(dense, with_shared_expert(experts), settings)


def _lara_rules(settings: ModelDescription) -> list[WeightRule]:
    dense = _mixed_rules(QWEN3.rules(settings), settings, _joined)
    experts = expert_rules(settings, "mlp", "gate_proj", "up_proj", "down_proj")
    tensors = [f"{_HF}mlp.experts.{part}_proj" for part in ("gate_up", "down")]
    joined = joined_experts(settings.num_moe_experts or 1, *tensors)
    experts = with_shared_expert(with_others(experts, *joined), has_gate=False)
    rules = by_mlp(dense, experts, settings)
    return renamed(rules, {".linear_attn.norm.": ".linear_attn.out_norm."})


def _mixed_rules(
    attention: list[WeightRule], settings: ModelDescription, runs: _Runs
) -> list[WeightRule]:
    """Return the rules of a dense model with a Gated DeltaNet in some layers."""
    recurrent = settings.layers_where(lambda kind: kind.is_recurrent)
    attending = settings.layers_where(lambda kind: kind.attends)
    own = [rule for rule in attention if ".self_attention." in rule.megatron_name]
    return [
        *(rule for rule in attention if rule not in own),
        *(replace(rule, layers=attending) for rule in own),
        *(replace(rule, layers=recurrent) for rule in _recurrent_rules(settings, runs)),
    ]


def _recurrent_rules(settings: ModelDescription, runs: _Runs) -> list[WeightRule]:
    """Return the rules of a Gated DeltaNet, whose rows Megatron orders by key head."""
    here, there = _MEGATRON + "self_attention.", _HF + "linear_attn."
    heads = settings.linear_num_key_heads
    keys = heads * settings.linear_key_head_dim
    values = settings.linear_num_value_heads * settings.linear_value_head_dim
    made = runs(keys, values, settings.linear_num_value_heads)
    entering = {f"{there}{name}.weight": rows for name, rows in made.items()}
    convolved = {there + "conv1d.weight": (keys, keys, values)}
    same = {"A_log": "A_log", "dt_bias": "dt_bias", "out_norm.weight": "norm.weight",
            "out_proj.weight": "out_proj.weight"}  # fmt: skip
    return [
        identity(here + "in_proj.layer_norm_weight", _HF + "input_layernorm.weight"),
        by_block(here + "in_proj.weight", heads, entering),
        by_block(here + "conv1d.weight", heads, convolved),
        *(identity(here + mine, there + theirs) for mine, theirs in same.items()),
    ]


QWEN3_NEXT = Family(
    "qwen3_next",
    "Qwen3NextForCausalLM",
    _settings,
    _fields,
    lambda settings: _rules(settings, _fused),
    only={**_GATED, **ALL_SPARSE},
    unused=OF_BALANCE,
    absent={"num_key_value_heads": 2, "head_dim": 256, "partial_rotary_factor": 0.25},
    without_meaning=QWEN3.without_meaning,
    left_out=_LATER_TOKENS,
)
QWEN3_5 = Family(
    "qwen3_5_text",
    "Qwen3_5ForCausalLM",
    _dense_settings,
    _dense_fields,
    lambda settings: _rules(settings, _apart),
    only=_GATED,
    unused=OF_BALANCE,
    absent={"num_key_value_heads": 4, "head_dim": 256, "partial_rotary_factor": 0.25},
    without_meaning=QWEN3.without_meaning,
    left_out=_LATER_TOKENS,
)
QWEN3_5_MOE = replace(
    QWEN3_5,
    model_type="qwen3_5_moe_text",
    architecture="Qwen3_5MoeForCausalLM",
    settings=_moe_settings,
    fields=_fields,
    absent={"num_key_value_heads": 2, "head_dim": 256, "partial_rotary_factor": 0.25},
)
LARA_MINI = replace(
    QWEN3_5,
    model_type="lara_mini",
    architecture="LaraMiniForCausalLM",
    settings=_lara_settings,
    fields=_lara_fields,
    rules=_lara_rules,
    absent={"num_key_value_heads": 4, "head_dim": 128, "sliding_window": 512,
            "tie_word_embeddings": True, "linear_num_key_heads": 8, "linear_num_value_heads": 16},
)  # fmt: skip
