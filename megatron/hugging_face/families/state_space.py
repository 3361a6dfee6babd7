"""Mamba-2, and hybrids of Mamba-2 and attention: Nemotron-H, Bamba.

A layer of Mamba-2 and Nemotron-H is either a mixer or an MLP, a letter of `hybrid_layer_pattern`. A
layer of Bamba has both.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from megatron.core.transformer.config.layer_kinds import KINDS, LayerKind
from megatron.hugging_face.config_fields import ConfigFields
from megatron.hugging_face.families.deepseek import judged_by_sigmoid
from megatron.hugging_face.families.family import SIZES, Family
from megatron.hugging_face.families.llama import LLAMA
from megatron.hugging_face.model_description import ModelDescription
from megatron.hugging_face.weight_map import (
    WeightRule,
    by_block,
    experts,
    identity,
    query_key_value,
    renamed,
    vocabulary,
)

_LAYER, _BACKBONE = "decoder.layers.{}.", "backbone.layers.{}."
_NO_END = 2**20
"""Longest sequence of a model without positions, if the config has no length."""
_OF_TRAINING = (
    "rescale_prenorm_residual", "time_step_floor", "time_step_max", "time_step_rank", "chunk_size",
    "mamba_chunk_size", "residual_in_fp32", "mamba_ssm_cache_dtype", "use_mamba_kernels",
    "num_logits_to_keep", "z_loss_coefficient", "output_router_logits", "hidden_dropout",
    "moe_shared_expert_overlap",
)  # fmt: skip
"""Fields that do not affect logits: of initialization, kernels and training."""
_NAMES = {
    "mamba2": ("state_size", "head_dim", "n_groups", "num_heads", "conv_kernel"),
    "nemotron_h": ("ssm_state_size", "mamba_head_dim", "n_groups", "mamba_num_heads",
                   "conv_kernel"),
    "bamba": ("mamba_d_state", "mamba_d_head", "mamba_n_groups", "mamba_n_heads", "mamba_d_conv"),
}  # fmt: skip
"""Family -> its names of the fields in `_SIZES`."""
_SIZES = ("mamba_state_dim", "mamba_head_dim", "mamba_num_groups", "mamba_num_heads",
          "linear_conv_kernel_dim")  # fmt: skip


_MAMBA2 = {
    "num_hidden_layers": "num_layers", "hidden_size": "hidden_size",
    "layer_norm_epsilon": "layernorm_epsilon", "vocab_size": "unpadded_vocab_size",
}  # fmt: skip
_NEMOTRON = {name: SIZES[name] for name in SIZES if name != "num_hidden_layers"} | {
    "layer_norm_epsilon": "layernorm_epsilon"
}


def _sizes(config: ConfigFields, family: str) -> dict[str, Any]:
    """Return the sizes of Mamba-2; take fields without effect, and refuse unsupported values."""
    for name in _OF_TRAINING:
        config.take(name, None)
    for name in ("use_conv_bias", "mamba_conv_bias"):
        config.only(name, True)
    for name in ("use_bias", "mamba_proj_bias"):
        config.only(name, False)
    return {mine: config.take(name) for mine, name in zip(_SIZES, _NAMES[family], strict=True)}


def _size_fields(settings: ModelDescription, family: str) -> dict[str, Any]:
    found = [getattr(settings, mine) for mine in _SIZES]
    found[_SIZES.index("mamba_num_heads")] = settings.mamba_heads
    return dict(zip(_NAMES[family], found, strict=True))


def _limits(config: ConfigFields) -> tuple[float, float]:
    """Return the bounds of step sizes; a bound may have the form {"__float__": "Infinity"}."""
    bounds = config.take("time_step_limit", [0.0, math.inf])
    low, high = (float(b["__float__"]) if isinstance(b, dict) else float(b) for b in bounds)
    return low, high


def _limit_fields(settings: ModelDescription) -> list[Any]:
    """Return the bounds of step sizes in Transformers' form: JSON has no number for infinity."""
    bounds = settings.mamba_step_limits
    return [{"__float__": "Infinity"} if math.isinf(bound) else bound for bound in bounds]


def mixer_rules(
    settings: ModelDescription, there: str, here: str = _LAYER + "self_attention."
) -> list[WeightRule]:
    """Return the rules of a Mamba-2 mixer, whose rows Megatron orders by group.

    Args:
        there: prefix of the mixer's weights in Hugging Face's files.
        here: prefix of Megatron's parameters.
    """
    g = settings.mamba_num_groups
    n = settings.mamba_heads
    inner, state = n * settings.mamba_head_dim, g * settings.mamba_state_dim
    same = {"A_log": "A_log", "D": "D", "dt_bias": "dt_bias", "norm_weight": "norm.weight",
            "out_proj.weight": "out_proj.weight"}  # fmt: skip
    return [
        by_block(
            here + "in_proj.weight", g, {there + "in_proj.weight": (inner, inner, state, state, n)}
        ),
        *(
            by_block(f"{here}conv1d.{part}", g, {f"{there}conv1d.{part}": (inner, state, state)})
            for part in ("weight", "bias")
        ),
        *(identity(here + mine, there + theirs) for mine, theirs in same.items()),
    ]


def _where(
    rules: list[WeightRule], settings: ModelDescription, holds: Callable[[LayerKind], object]
) -> list[WeightRule]:
    layers = settings.layers_where(holds)
    return [replace(rule, layers=layers) for rule in rules] if layers else []


def _ends(settings: ModelDescription) -> list[WeightRule]:
    rules = [
        vocabulary("embedding.word_embeddings.weight", "backbone.embeddings.weight"),
        identity("decoder.final_layernorm.weight", "backbone.norm_f.weight"),
    ]
    if settings.untie_embeddings_and_output_weights:
        rules.append(vocabulary("output_layer.weight", "lm_head.weight"))
    return rules


def _mamba2_settings(config: ConfigFields) -> ModelDescription:
    sizes, same = _sizes(config, "mamba2"), config.take_all(_MAMBA2)
    hidden = same["hidden_size"]
    return ModelDescription(
        **same,
        num_attention_heads=sizes["mamba_num_groups"],
        kv_channels=hidden // sizes["mamba_num_groups"],
        ffn_hidden_size=4 * hidden,
        max_position_embeddings=_NO_END,
        untie_embeddings_and_output_weights=not config.take("tie_word_embeddings", False),
        position_embedding_type="none",
        normalization="RMSNorm",
        add_bias_linear=False,
        hidden_dropout=0.0,
        attention_dropout=0.0,
        hybrid_layer_pattern="M" * same["num_layers"],
        mamba_step_limits=_limits(config),
        **sizes,
    )


def _mamba2_fields(settings: ModelDescription) -> dict[str, Any]:
    inner = settings.mamba_heads * settings.mamba_head_dim
    return {
        **_size_fields(settings, "mamba2"),
        **settings.fields(_MAMBA2),
        "expand": inner // settings.hidden_size,
        "use_bias": False,
        "use_conv_bias": True,
        "tie_word_embeddings": not settings.untie_embeddings_and_output_weights,
        "time_step_limit": _limit_fields(settings),
    }


def _mamba2_rules(settings: ModelDescription) -> list[WeightRule]:
    norm = _LAYER + "self_attention.in_proj.layer_norm_weight"
    return [
        *_ends(settings),
        identity(norm, _BACKBONE + "norm.weight"),
        *mixer_rules(settings, _BACKBONE + "mixer."),
    ]


_LETTERS = {"linear_attention": "M", "full_attention": "*", "mlp": "-", "moe": "E"}
_OLDER = {"mamba": "M", "attention": "*"}


def _nemotron_settings(config: ConfigFields) -> ModelDescription:
    letters = config.take("hybrid_override_pattern", None)
    if letters is None or config.stated("layers_block_type") is not None:
        kinds = config.take("layers_block_type")
        named = "".join((_LETTERS | _OLDER).get(kind, "?") for kind in kinds)
        letters = config.one_of(("layers_block_type", named), ("hybrid_override_pattern", letters))
    config.only("num_hidden_layers", len(letters))
    if set(letters) - set(_LETTERS.values()):
        config.only("layers_block_type", *_LETTERS)
        letters = "M"
    groups, same = config.take("num_key_value_heads"), config.take_all(_NEMOTRON)
    factor = config.take("routed_scaling_factor", 1.0)
    settings = ModelDescription(
        num_layers=len(letters),
        **same,
        group_query_attention=groups != same["num_attention_heads"],
        num_query_groups=groups,
        kv_channels=config.take("head_dim"),
        untie_embeddings_and_output_weights=not config.take("tie_word_embeddings", False),
        position_embedding_type="none",
        normalization="RMSNorm",
        squared_relu=True,
        add_bias_linear=False,
        hidden_dropout=0.0,
        attention_dropout=config.take("attention_dropout", 0.0),
        hybrid_layer_pattern=letters,
        # Transformers' model clamps steps by time_step_min and ignores time_step_limit.
        mamba_step_limits=(config.take("time_step_min", 0.001), math.inf),
        **_sizes(config, "nemotron_h"),
    )
    routed = judged_by_sigmoid(
        replace(
            settings,
            num_moe_experts=config.take("n_routed_experts", 8),
            moe_layer_freq=[int(letter == "E") for letter in letters],
            moe_router_topk=config.take("num_experts_per_tok", 2),
            moe_ffn_hidden_size=config.take("moe_intermediate_size", None),
            moe_latent_size=config.take("moe_latent_size", None),
            moe_router_topk_scaling_factor=None if factor == 1.0 else factor,
            moe_router_dtype="fp32",
            moe_shared_expert_intermediate_size=config.take(
                "moe_shared_expert_intermediate_size", None
            ),
        ),
        config,
    )
    return routed if "E" in letters else settings


def _nemotron_fields(settings: ModelDescription) -> dict[str, Any]:
    kind_of = {letter: kind for kind, letter in _LETTERS.items()}
    letter_of = {KINDS[letter]: letter for letter in kind_of}
    fields = {
        **_size_fields(settings, "nemotron_h"),
        **settings.fields(_NEMOTRON),
        "layers_block_type": [kind_of.get(letter_of.get(k, ""), "?") for k in settings.layer_kinds],
        "num_key_value_heads": settings.num_key_value_heads,
        "head_dim": settings.head_dim,
        "tie_word_embeddings": not settings.untie_embeddings_and_output_weights,
        "time_step_min": settings.mamba_step_limits[0],
    }
    if settings.num_moe_experts is None:
        return fields
    return fields | {
        "n_routed_experts": settings.num_moe_experts,
        "num_experts_per_tok": settings.moe_router_topk,
        "moe_intermediate_size": settings.experts_width,
        "moe_latent_size": settings.moe_latent_size,
        "moe_shared_expert_intermediate_size": settings.moe_shared_expert_intermediate_size or 0,
        "routed_scaling_factor": settings.moe_router_topk_scaling_factor or 1.0,
        "norm_topk_prob": True,
        "n_group": settings.moe_router_num_groups or 1,
        "topk_group": settings.moe_router_group_topk or 1,
    }


def _nemotron_rules(settings: ModelDescription) -> list[WeightRule]:
    here, there, norm = _LAYER + "self_attention.", _BACKBONE + "mixer.", _BACKBONE + "norm.weight"
    projections = [f"{there}{part}_proj.weight" for part in "qkv"]
    attention = [
        identity(here + "linear_qkv.layer_norm_weight", norm),
        query_key_value(here + "linear_qkv.weight", *projections),
        identity(here + "linear_proj.weight", there + "o_proj.weight"),
    ]
    mlp = [
        identity(_LAYER + "mlp.linear_fc1.layer_norm_weight", norm),
        identity(_LAYER + "mlp.linear_fc1.weight", there + "up_proj.weight"),
        identity(_LAYER + "mlp.linear_fc2.weight", there + "down_proj.weight"),
    ]
    mixer = [identity(here + "in_proj.layer_norm_weight", norm), *mixer_rules(settings, there)]
    return [
        *_ends(settings),
        *_where(mixer, settings, lambda kind: kind.is_recurrent),
        *_where(attention, settings, lambda kind: kind.attends),
        *_where(mlp, settings, lambda kind: kind == KINDS["-"]),
        *_where(_expert_rules(settings), settings, lambda kind: kind.has_experts),
    ]


def _expert_rules(settings: ModelDescription) -> list[WeightRule]:
    here, there = _LAYER + "mlp.", _BACKBONE + "mixer."
    same = {
        "router.weight": "gate.weight",
        "router.expert_bias": "gate.e_score_correction_bias",
        "shared_experts.linear_fc1.weight": "shared_experts.up_proj.weight",
        "shared_experts.linear_fc2.weight": "shared_experts.down_proj.weight",
    }
    if settings.moe_latent_size:
        same |= {f"fc{i}_latent_proj.weight": f"fc{i}_latent_proj.weight" for i in (1, 2)}
    return [
        identity(_LAYER + "pre_mlp_layernorm.weight", _BACKBONE + "norm.weight"),
        *(identity(here + mine, there + theirs) for mine, theirs in same.items()),
        *(
            experts(
                f"{here}experts.experts.linear_fc{i}.weight",
                settings.num_moe_experts or 1,
                f"{there}experts.{{expert}}.{name}_proj.weight",
            )
            for i, name in ((1, "up"), (2, "down"))
        ),
    ]


def mixer_settings(config: ConfigFields, family: str) -> dict[str, Any]:
    """Return the settings of Mamba-2 in a family with an MLP in each layer, Bamba or Granite.

    Args:
        family: key of `_NAMES`.
    """
    config.take("mamba_expand", None)  # follows from the number and width of heads
    return {**_sizes(config, family), "mamba_step_limits": _limits(config)}


def mixer_fields(settings: ModelDescription, family: str) -> dict[str, Any]:
    """Return the fields of `mixer_settings`."""
    return {
        **_size_fields(settings, family),
        "mamba_expand": settings.mamba_heads * settings.mamba_head_dim // settings.hidden_size,
        "mamba_conv_bias": True,
        "mamba_proj_bias": False,
        "time_step_limit": _limit_fields(settings),
    }


def layer_rules(rules: list[WeightRule], settings: ModelDescription) -> list[WeightRule]:
    """Replace attention by Mamba-2 in the recurrent layers of a model's rules."""
    of_attention = [rule for rule in rules if ".self_attention." in rule.megatron_name]
    norm = _LAYER + "self_attention.in_proj.layer_norm_weight"
    mixer = [
        identity(norm, "model.layers.{}.input_layernorm.weight"),
        *mixer_rules(settings, "model.layers.{}.mamba."),
    ]
    return [
        *(rule for rule in rules if rule not in of_attention),
        *_where(of_attention, settings, lambda kind: kind.attends),
        *_where(mixer, settings, lambda kind: kind.is_recurrent),
    ]


def _bamba_settings(config: ConfigFields) -> ModelDescription:
    attending = set(config.take("attn_layer_indices", []))
    mixers = mixer_settings(config, "bamba")
    config.only("partial_rotary_factor", 0.5)  # Transformers reads others in rope_parameters only
    settings = LLAMA.settings(config)
    return replace(
        settings,
        experimental_attention_variant="mamba2",
        linear_attention_freq=[int(n not in attending) for n in range(settings.num_layers)],
        **mixers,
    )


def _bamba_fields(settings: ModelDescription) -> dict[str, Any]:
    fields = LLAMA.fields(settings)
    del fields["head_dim"]
    rope = {"rope_type": "default", **(fields.pop("rope_scaling") or {})}
    rope |= {"rope_theta": fields["rope_theta"], "partial_rotary_factor": settings.rotary_percent}
    return {
        **fields,
        **mixer_fields(settings, "bamba"),
        "rope_parameters": rope,
        "attn_layer_indices": list(settings.layers_where(lambda kind: kind.attends)),
    }


def _bamba_rules(settings: ModelDescription) -> list[WeightRule]:
    renames = {"post_attention_layernorm": "pre_ff_layernorm", ".mlp.": ".feed_forward.",
               "model.norm.": "model.final_layernorm."}  # fmt: skip
    return layer_rules(renamed(LLAMA.rules(settings), renames), settings)


MAMBA2 = Family(
    "mamba2",
    "Mamba2ForCausalLM",
    _mamba2_settings,
    _mamba2_fields,
    _mamba2_rules,
    only={"hidden_act": "silu"},
    unused=("time_step_min", "expand"),  # `expand` follows from the number and width of heads
)
NEMOTRON_H = Family(
    "nemotron_h",
    "NemotronHForCausalLM",
    _nemotron_settings,
    _nemotron_fields,
    _nemotron_rules,
    only={
        "mlp_hidden_act": "relu2",
        "mamba_hidden_act": "silu",
        "attention_bias": False,
        "mlp_bias": False,
        "n_shared_experts": 1,
    },
    # Transformers' model ignores them, or their layers are left out.
    unused=(
        "expand",
        "time_step_limit",
        "sliding_window",
        "num_nextn_predict_layers",
        "mtp_layers_block_type",
    ),
    absent={"moe_intermediate_size": 7688, "moe_shared_expert_intermediate_size": 7688},
    left_out={r"mtp\..*": "the layers that predict later tokens"},
)
BAMBA = Family(
    "bamba",
    "BambaForCausalLM",
    _bamba_settings,
    _bamba_fields,
    _bamba_rules,
    only=LLAMA.only,
    absent={"num_key_value_heads": 8, "partial_rotary_factor": 0.5},
    without_meaning=LLAMA.without_meaning,
)
FAMILIES = (MAMBA2, NEMOTRON_H, BAMBA)
