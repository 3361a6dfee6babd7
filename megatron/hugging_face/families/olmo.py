"""OLMo: norms after each branch instead of before, and norms over all heads of a token.

Team OLMo, "2 OLMo 2 Furious", section 3, arXiv 2501.00656. OLMo 3 adds windows, whose layers rotate
without YaRN. OLMo Hybrid has Gated DeltaNet in most layers, with norms before the branches.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from megatron.hugging_face.config_fields import ConfigFields
from megatron.hugging_face.families.family import window_fields, with_window
from megatron.hugging_face.families.llama import LLAMA, gated_settings
from megatron.hugging_face.model_description import ModelDescription
from megatron.hugging_face.rope import rope_fields_by_window, with_rope, with_rope_by_window
from megatron.hugging_face.weight_map import WeightRule, by_block, identity, with_others

_MEGATRON, _HF = "decoder.layers.{}.", "model.layers.{}."
_ARRANGED: dict[str, Any] = {
    "qk_layernorm": True,
    "qk_layernorm_across_heads": True,
    "reordered_norm": True,
}
_BASE = 500_000.0
_KINDS = ("full_attention", "linear_attention")
_SIZES = (
    "linear_num_key_heads", "linear_num_value_heads", "linear_key_head_dim",
    "linear_value_head_dim", "linear_conv_kernel_dim", "linear_allow_neg_eigval",
)  # fmt: skip
"""Fields with the names of their settings."""
_HYBRID_EPSILON = 1e-5
"""Epsilon of the norms of recurrent heads."""


def _olmo3_settings(config: ConfigFields) -> ModelDescription:
    settings = replace(gated_settings(config), swiglu=True, **_ARRANGED)
    usual = [(n + 1) % 4 != 0 for n in range(settings.num_layers)]
    settings = with_window(settings, config, usual)
    return with_rope_by_window(settings, config, base=_BASE, local_base=_BASE)


def _olmo3_fields(settings: ModelDescription) -> dict[str, Any]:
    fields = LLAMA.fields(settings)
    for name in ("rope_theta", "rope_scaling"):
        del fields[name]
    return {**fields, **rope_fields_by_window(settings), **window_fields(settings)}


def reordered_rules(settings: ModelDescription) -> list[WeightRule]:
    """Return Llama's rules, with norms after the branches instead of before."""
    after = {
        "post_self_attn_layernorm": "post_attention_layernorm",
        "post_mlp_layernorm": "post_feedforward_layernorm",
    }
    return [
        *(rule for rule in LLAMA.rules(settings) if ".layer_norm_" not in rule.megatron_name),
        *(identity(f"{_MEGATRON}{a}.weight", f"{_HF}{b}.weight") for a, b in after.items()),
    ]


def _hybrid_settings(config: ConfigFields) -> ModelDescription:
    settings = replace(gated_settings(config), swiglu=True, **_ARRANGED)
    usual = [_KINDS[(n + 1) % 4 != 0] for n in range(settings.num_layers)]
    if "full_attention" not in usual:
        usual[-1:] = ["full_attention"]
    kinds = config.take("layer_types", usual)
    if set(kinds) - set(_KINDS):
        config.only("layer_types", *_KINDS)
    heads = config.take("linear_num_key_heads", settings.num_attention_heads)
    width = config.take("linear_key_head_dim", int(0.75 * settings.hidden_size / heads))
    usually = (heads, settings.num_attention_heads, width, 2 * width, 4, True)
    settings = replace(
        settings,
        experimental_attention_variant="gated_delta_net",
        linear_attention_freq=[_KINDS.index(kind) for kind in kinds],
        linear_norm_epsilon=_HYBRID_EPSILON,
        **{name: config.take(name, value) for name, value in zip(_SIZES, usually, strict=True)},
    )
    rope = config.one_of("rope_parameters", "rope_scaling") or {}
    if rope.get("rope_theta", 0) is None or (
        "rope_theta" not in rope and config.is_null("rope_theta")
    ):
        return replace(settings, position_embedding_type="none")
    return with_rope(settings, config)


def _hybrid_fields(settings: ModelDescription) -> dict[str, Any]:
    fields = LLAMA.fields(settings)
    del fields["head_dim"]
    if not settings.has_rotary_positions:
        fields |= {"rope_theta": None, "rope_scaling": None}
    return {
        **fields,
        **settings.fields({name: name for name in _SIZES}),
        "layer_types": [_KINDS[kind.is_recurrent] for kind in settings.layer_kinds],
    }


def _hybrid_rules(settings: ModelDescription) -> list[WeightRule]:
    """Return the rules of both kinds of layers; Megatron orders recurrent rows by key head."""
    attending = settings.layers_where(lambda kind: not kind.is_recurrent)
    recurrent = settings.layers_where(lambda kind: kind.is_recurrent)
    here, there = _MEGATRON + "self_attention.", _HF + "linear_attn."
    n, heads = settings.linear_num_value_heads, settings.linear_num_key_heads
    keys = heads * settings.linear_key_head_dim
    values = n * settings.linear_value_head_dim
    entering = {"q": keys, "k": keys, "v": values, "g": values, "b": n, "a": n}
    same = {"A_log": "A_log", "dt_bias": "dt_bias", "out_norm.weight": "o_norm.weight",
            "out_proj.weight": "o_proj.weight"}  # fmt: skip
    before = {
        "self_attention.in_proj.layer_norm_weight": "attention_layer_norm",
        "mlp.linear_fc1.layer_norm_weight": "feedforward_layer_norm",
    }
    of_recurrence = [
        *(identity(_MEGATRON + mine, f"{_HF}{theirs}.weight") for mine, theirs in before.items()),
        by_block(
            here + "in_proj.weight",
            heads,
            {f"{there}{part}_proj.weight": (rows,) for part, rows in entering.items()},
        ),
        by_block(
            here + "conv1d.weight",
            heads,
            {f"{there}{part}_conv1d.weight": (entering[part],) for part in "qkv"},
        ),
        *(identity(here + mine, there + theirs) for mine, theirs in same.items()),
    ]
    after = identity(
        _MEGATRON + "post_self_attn_layernorm.weight", _HF + "feedforward_layer_norm.weight"
    )
    of_attention = ("self_attention.", "_layernorm.weight")
    return [
        *(
            replace(rule, layers=attending)
            if "layers" in rule.megatron_name
            and any(part in rule.megatron_name for part in of_attention)
            else rule
            for rule in with_others(reordered_rules(settings), after)
        ),
        *(replace(rule, layers=recurrent) for rule in of_recurrence),
    ]


OLMO2 = replace(
    LLAMA,
    model_type="olmo2",
    architecture="Olmo2ForCausalLM",
    settings=lambda config: replace(LLAMA.settings(config), **_ARRANGED),
    rules=reordered_rules,
)
OLMO3 = replace(
    OLMO2,
    model_type="olmo3",
    architecture="Olmo3ForCausalLM",
    settings=_olmo3_settings,
    fields=_olmo3_fields,
    absent={"sliding_window": 4096},
)
OLMO_HYBRID = replace(
    OLMO2,
    model_type="olmo_hybrid",
    architecture="OlmoHybridForCausalLM",
    settings=_hybrid_settings,
    fields=_hybrid_fields,
    rules=_hybrid_rules,
    # Of the initial weights.
    unused=("linear_a_log_min", "linear_a_log_max", "linear_dt_min", "linear_dt_max",
            "linear_dt_init_floor"),
    # Transformers writes the norms of both kinds of layers by the names of recurrent layers.
    other_names={
        r"\.input_layernorm\.": ".attention_layer_norm.",
        r"\.post_attention_layernorm\.": ".feedforward_layer_norm.",
    },
)  # fmt: skip
FAMILIES = (OLMO2, OLMO3, OLMO_HYBRID)
