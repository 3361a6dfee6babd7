"""Granite: a Llama with factors on the embedding, scores, residual branches and logits.

Granite 3 is dense (`granite`) or has experts (`granitemoe`), also beside a shared one
(`granitemoeshared`). A layer of Granite 4
(`granitemoehybrid`) has Mamba-2 or attention, and then an MLP, alone or as a shared expert.
`granite_swa` has windows and sinks, and a rotary base for each layer. HyperCLOVA X (arXiv
2404.01954) also has norms after both branches, and its factor on the logits multiplies.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from megatron.core.transformer.yarn import yarn_softmax_scale
from megatron.hugging_face.config_fields import ConfigFields
from megatron.hugging_face.families.experts import OF_BALANCE
from megatron.hugging_face.families.family import window_fields, with_window
from megatron.hugging_face.families.llama import LLAMA
from megatron.hugging_face.families.state_space import (
    layer_rules,
    mixer_fields,
    mixer_settings,
)
from megatron.hugging_face.model_description import ModelDescription
from megatron.hugging_face.weight_map import WeightRule, identity, joined_experts

_MEGATRON, _HF = "decoder.layers.{}.", "model.layers.{}."
_FACTORS = ("embedding_multiplier", "residual_multiplier", "logits_scaling")
_RECURRENT, _ATTENDING = ("mamba", "linear_attention"), ("attention", "full_attention")
"""Names of kinds of layers, in published files and in newer ones."""
_DIGITS = 14
"""Significant digits of a factor that is the result of a division."""


def _rounded(factor: float) -> float:
    return float(f"{factor:.{_DIGITS}g}")


def _temperature(settings: ModelDescription) -> float:
    """Return YaRN's factor on scores, in addition to the attention multiplier."""
    if settings.position_embedding_type != "yarn" or settings.rotary_percent != 1.0:
        return 1.0
    width = settings.head_dim
    strengths = settings.mscale, settings.mscale_all_dim
    scale = yarn_softmax_scale(width, settings.rotary_scaling_factor, *strengths)
    return float(scale * width**0.5)


def _settings(config: ConfigFields) -> ModelDescription:
    settings = LLAMA.settings(config)
    multiplier = float(config.take("attention_multiplier", 1.0))
    factors: dict[str, Any] = {name: float(config.take(name, 1.0)) for name in _FACTORS}
    return replace(settings, softmax_scale=multiplier * _temperature(settings), **factors)


def _fields(settings: ModelDescription) -> dict[str, Any]:
    multiplier, temperature = settings.scale_of_scores or 1.0, _temperature(settings)
    if temperature != 1.0:
        multiplier = _rounded(multiplier / temperature)
    return {
        **LLAMA.fields(settings),
        "attention_multiplier": multiplier,
        **{name: getattr(settings, name) for name in _FACTORS},
    }


def _moe_settings(config: ConfigFields) -> ModelDescription:
    return _with_experts(_settings(config), config, config.take("num_local_experts"))


def _with_experts(settings: ModelDescription, config: ConfigFields, count: int) -> ModelDescription:
    return replace(
        settings,
        num_moe_experts=count,
        moe_router_topk=config.take("num_experts_per_tok", 2),
        moe_ffn_hidden_size=settings.ffn_hidden_size,
    )


def _moe_fields(settings: ModelDescription) -> dict[str, Any]:
    return {
        **_fields(settings),
        "intermediate_size": settings.experts_width,
        "num_local_experts": settings.num_moe_experts or 0,
        "num_experts_per_tok": settings.moe_router_topk,
    }


def _expert_rules(settings: ModelDescription) -> list[WeightRule]:
    """Return the rules of a layer's experts; Hugging Face has one tensor of all, gates first."""
    here, there = _MEGATRON + "mlp.", _HF + "block_sparse_moe."
    return [
        identity(_MEGATRON + "pre_mlp_layernorm.weight", _HF + "post_attention_layernorm.weight"),
        identity(here + "router.weight", there + "router.layer.weight"),
        *joined_experts(
            settings.num_moe_experts or 1,
            there + "input_linear.weight",
            there + "output_linear.weight",
        ),
    ]


def _moe_rules(settings: ModelDescription) -> list[WeightRule]:
    others = [rule for rule in LLAMA.rules(settings) if ".mlp." not in rule.megatron_name]
    return [*others, *_expert_rules(settings)]


def _hybrid_settings(config: ConfigFields) -> ModelDescription:
    rotates = config.only("position_embedding_type", "rope", "nope") == "rope"
    if not rotates:
        for name in ("rope_parameters", "rope_scaling", "rope_theta"):
            config.take(name, None)
        config = config.with_fields(dict.fromkeys(("rope_parameters", "rope_scaling")))
    settings = _settings(config)
    if not rotates:
        settings = replace(settings, position_embedding_type="none")
    shared, count = config.take("shared_intermediate_size"), config.take("num_local_experts")
    if count:
        settings = _with_experts(settings, config, count)
        settings = replace(settings, moe_shared_expert_intermediate_size=shared)
    else:
        config.take("num_experts_per_tok", None)
        settings = replace(settings, ffn_hidden_size=shared)
    return _with_mixers(settings, config)


def _with_mixers(settings: ModelDescription, config: ConfigFields) -> ModelDescription:
    stated = config.one_of("layer_types", "layers_block_type")
    kinds = stated or [_RECURRENT[0]] * settings.num_layers
    if set(kinds) - {*_RECURRENT, *_ATTENDING}:
        config.only("layer_types", *_RECURRENT, *_ATTENDING)
    heads, width = config.take("mamba_n_heads"), config.take("mamba_d_head", "auto")
    if width == "auto":
        inner = config.take("mamba_expand", 2) * settings.hidden_size
        config = config.with_fields({"mamba_d_head": inner // heads})
    mixers = mixer_settings(config, "bamba")
    has_it = [int(kind in _RECURRENT) for kind in kinds]
    if not any(has_it):
        return settings
    return replace(
        settings,
        experimental_attention_variant="mamba2",
        linear_attention_freq=has_it,
        **mixers,
    )


def _hybrid_fields(settings: ModelDescription) -> dict[str, Any]:
    is_recurrent = [kind.is_recurrent for kind in settings.layer_kinds]
    fields = _moe_fields(settings)
    if settings.num_moe_experts is None:
        fields["shared_intermediate_size"] = settings.ffn_hidden_size
    else:
        fields["shared_intermediate_size"] = settings.moe_shared_expert_intermediate_size or 0
    # Without a Mamba-2 layer its sizes have no effect, but Transformers checks them.
    without = {"mamba_n_heads": 1, "mamba_d_head": 2 * settings.hidden_size, "mamba_n_groups": 1,
               "mamba_expand": 2}  # fmt: skip
    return {
        **fields,
        **mixer_fields(settings, "bamba"),
        **({} if any(is_recurrent) else without),
        "layer_types": [(_RECURRENT if has_it else _ATTENDING)[0] for has_it in is_recurrent],
        "position_embedding_type": "rope" if settings.has_rotary_positions else None,
    }


def _hybrid_rules(settings: ModelDescription) -> list[WeightRule]:
    there = _HF + "shared_mlp."
    if settings.num_moe_experts is None:
        here = _MEGATRON + "mlp."
        matrices = (here + "linear_fc1.weight", here + "linear_fc2.weight")
        found = [rule for rule in LLAMA.rules(settings) if rule.megatron_name not in matrices]
    else:
        here = _MEGATRON + "mlp.shared_experts."
        found = _moe_rules(settings)
    shared = [
        identity(here + "linear_fc1.weight", there + "input_linear.weight"),
        identity(here + "linear_fc2.weight", there + "output_linear.weight"),
    ]
    return layer_rules([*found, *shared], settings)


def _shared_settings(config: ConfigFields) -> ModelDescription:
    width = config.take("shared_intermediate_size", 0)
    return replace(_moe_settings(config), moe_shared_expert_intermediate_size=width or None)


def _shared_fields(settings: ModelDescription) -> dict[str, Any]:
    width = settings.moe_shared_expert_intermediate_size or 0
    return {**_moe_fields(settings), "shared_intermediate_size": width}


def _swa_settings(config: ConfigFields) -> ModelDescription:
    settings = _settings(config)
    settings = with_window(settings, config, [n % 4 != 0 for n in range(settings.num_layers)])
    bases = config.take("layer_rope_theta", [settings.rotary_base] * settings.num_layers)
    of_windows, of_others = (
        {base for base, windowed in zip(bases, settings.windowed_layers, strict=True)
         if base and windowed == wanted}
        for wanted in (True, False)
    )  # fmt: skip
    base = next(iter(of_others or of_windows or {settings.rotary_base}))
    local = next(iter(of_windows or {base}))
    plain = replace(settings, position_embedding_type="rope", use_rope_scaling=False,
                    rotary_seq_len_interpolation_factor=None)  # fmt: skip
    if max(len(of_windows), len(of_others)) > 1 or (local != base and settings != plain):
        config.only("layer_rope_theta")
    return replace(
        settings,
        softmax_type="learnable",
        rotary_base=base,
        rotary_base_local=None if local == base else local,
        no_rope_freq=None if all(bases) else [int(not base) for base in bases],
    )


def _swa_fields(settings: ModelDescription) -> dict[str, Any]:
    base, skips = settings.rotary_base, settings.no_rope_freq or [0] * settings.num_layers
    local = settings.rotary_base_local or base
    bases = [local if windowed else base for windowed in settings.windowed_layers]
    rotary = [0 if skip else base for skip, base in zip(skips, bases, strict=True)]
    return {**_fields(settings), **window_fields(settings), "layer_rope_theta": rotary}


def _swa_rules(settings: ModelDescription) -> list[WeightRule]:
    sinks = _MEGATRON + "self_attention.core_attention.softmax_offset"
    return [*LLAMA.rules(settings), identity(sinks, _HF + "self_attn.sinks")]


def _hyperclovax_settings(config: ConfigFields) -> ModelDescription:
    factor = float(config.take("logits_scaling", 1.0))
    settings = _settings(config.with_fields({"logits_scaling": 1 / factor}))
    if config.stated("attention_multiplier") is None:
        usual = settings.head_dim**-0.5
        settings = replace(settings, softmax_scale=usual * _temperature(settings))
    return replace(settings, sandwich_norm=config.take("use_post_norm", True))


def _hyperclovax_fields(settings: ModelDescription) -> dict[str, Any]:
    factor = _rounded(1 / settings.logits_scaling)
    added = {"logits_scaling": factor, "use_post_norm": settings.sandwich_norm}
    return {**_fields(settings), **added}


def _hyperclovax_rules(settings: ModelDescription) -> list[WeightRule]:
    after = {"post_self_attn_layernorm": "post_norm1", "post_mlp_layernorm": "post_norm2"}
    norms = [
        identity(f"{_MEGATRON}{mine}.weight", f"{_HF}{theirs}.weight")
        for mine, theirs in after.items()
    ]
    return [*LLAMA.rules(settings), *norms] if settings.sandwich_norm else LLAMA.rules(settings)


GRANITE = replace(
    LLAMA,
    model_type="granite",
    architecture="GraniteForCausalLM",
    settings=_settings,
    fields=_fields,
)
GRANITE_MOE = replace(
    LLAMA,
    model_type="granitemoe",
    architecture="GraniteMoeForCausalLM",
    settings=_moe_settings,
    fields=_moe_fields,
    rules=_moe_rules,
    unused=OF_BALANCE,
)
GRANITE_HYBRID = replace(
    LLAMA,
    model_type="granitemoehybrid",
    architecture="GraniteMoeHybridForCausalLM",
    settings=_hybrid_settings,
    fields=_hybrid_fields,
    rules=_hybrid_rules,
    unused=OF_BALANCE,
)
GRANITE_MOE_SHARED = replace(
    GRANITE_MOE,
    model_type="granitemoeshared",
    architecture="GraniteMoeSharedForCausalLM",
    settings=_shared_settings,
    fields=_shared_fields,
    rules=lambda model: (
        _hybrid_rules(model) if model.moe_shared_expert_intermediate_size else _moe_rules(model)
    ),
)
GRANITE_SWA = replace(
    LLAMA,
    model_type="granite_swa",
    architecture="GraniteSWAForCausalLM",
    settings=_swa_settings,
    fields=_swa_fields,
    rules=_swa_rules,
    absent={"num_key_value_heads": 4, "sliding_window": 128, "tie_word_embeddings": True},
)
HYPERCLOVAX = replace(
    LLAMA,
    model_type="hyperclovax",
    architecture="HyperCLOVAXForCausalLM",
    settings=_hyperclovax_settings,
    fields=_hyperclovax_fields,
    rules=_hyperclovax_rules,
)
FAMILIES = (GRANITE, GRANITE_MOE, GRANITE_MOE_SHARED, GRANITE_HYBRID, GRANITE_SWA, HYPERCLOVAX)
