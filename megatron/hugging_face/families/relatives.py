"""Dense models with a few differences from Llama.

Seed-OSS: biases of queries, keys and values. ERNIE 4.5: adjacent channels rotate.
SmolLM3: layers without rotary positions. CWM and Ministral: layers with windows. Arcee: a squared
ReLU without a gate. StableLM: LayerNorm and partly rotated heads. Nemotron: a squared ReLU,
zero-centred LayerNorm and partly rotated heads. StarCoder 2: LayerNorm, GELU and biases everywhere.
InternLM3 and IQuest-Coder: a Llama under another name.
Apertus: xIELU without a gate, and norms on query and key heads.
Phi-3: one tensor of queries, keys and values, and one of gate and up.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from typing import Any

from megatron.hugging_face.config_fields import ConfigFields
from megatron.hugging_face.families.family import Family, window_fields, with_window
from megatron.hugging_face.families.llama import GATED, LLAMA, MISTRAL, gated_settings
from megatron.hugging_face.model_description import ModelDescription
from megatron.hugging_face.rope import rope_parameters, with_rope
from megatron.hugging_face.weight_map import (
    WeightRule,
    fused_query_key_value,
    identity,
    renamed,
    with_others,
)

_MEGATRON, _HF = "decoder.layers.{}.", "model.layers.{}."
_FC1 = _MEGATRON + "mlp.linear_fc1.weight"
_CONTEXT = "original_max_position_embeddings"
_LONG = ("longrope", "su", "yarn")
"""Names of LongRoPE in the configs of Phi-3, the newest first."""
_PHI3_FUSED = (
    fused_query_key_value(
        _MEGATRON + "self_attention.linear_qkv.weight", _HF + "self_attn.qkv_proj.weight"
    ),
    identity(_FC1, _HF + "mlp.gate_up_proj.weight"),
)


def _seed_oss_settings(config: ConfigFields) -> ModelDescription:
    return replace(LLAMA.settings(config), add_qkv_bias=config.take("attention_bias", True))


def _seed_oss_fields(settings: ModelDescription) -> dict[str, Any]:
    added = {"residual_dropout": 0.0, "attention_bias": settings.add_qkv_bias}
    return {**LLAMA.fields(settings), **added}


def _smollm3_settings(config: ConfigFields) -> ModelDescription:
    settings = LLAMA.settings(config)
    interval = config.take("no_rope_layer_interval", 4)
    usual = [int((layer + 1) % interval != 0) for layer in range(settings.num_layers)]
    rotates = config.take("no_rope_layers", usual)  # despite the name, 1 means that a layer rotates
    skips = None if all(rotates) else [int(not does) for does in rotates]
    return replace(settings, no_rope_freq=skips)


def _smollm3_fields(settings: ModelDescription) -> dict[str, Any]:
    skips = settings.no_rope_freq or [0] * settings.num_layers
    return {**LLAMA.fields(settings), "no_rope_layers": [int(not skip) for skip in skips]}


def _cwm_settings(config: ConfigFields) -> ModelDescription:
    settings = LLAMA.settings(config)
    return with_window(settings, config, [n % 4 != 0 for n in range(settings.num_layers)])


def _ministral_settings(config: ConfigFields) -> ModelDescription:
    settings = LLAMA.settings(config)
    return with_window(settings, config, [True] * settings.num_layers)


def _windowed_fields(settings: ModelDescription) -> dict[str, Any]:
    return {**LLAMA.fields(settings), **window_fields(settings)}


def _plain_settings(config: ConfigFields, norm_epsilon: str) -> ModelDescription:
    """Return the settings of a model with LayerNorm and rotary positions.

    Args:
        norm_epsilon: name of the config's field.
    """
    usual = config.renamed({norm_epsilon: "rms_norm_eps"})
    settings = replace(gated_settings(usual), normalization="LayerNorm")
    return with_rope(settings, config)


def _plain_fields(settings: ModelDescription, norm_epsilon: str) -> dict[str, Any]:
    fields = LLAMA.fields(settings)
    del fields["head_dim"]
    fields[norm_epsilon] = fields.pop("rms_norm_eps")
    return {**fields, "partial_rotary_factor": settings.rotary_percent}


def _stablelm_settings(config: ConfigFields) -> ModelDescription:
    has_bias = config.take("use_qkv_bias", False)
    return replace(_plain_settings(config, "layer_norm_eps"), swiglu=True, add_qkv_bias=has_bias)


def _stablelm_fields(settings: ModelDescription) -> dict[str, Any]:
    fields = _plain_fields(settings, "layer_norm_eps")
    return {**fields, "use_qkv_bias": settings.add_qkv_bias}


def _nemotron_settings(config: ConfigFields) -> ModelDescription:
    settings = _plain_settings(config, "norm_eps")
    return replace(settings, squared_relu=True, layernorm_zero_centered_gamma=True)


def _starcoder2_settings(config: ConfigFields) -> ModelDescription:
    settings = _plain_settings(config, "norm_epsilon")
    window = config.take("sliding_window", None)
    return replace(
        settings,
        openai_gelu=True,
        add_bias_linear=True,
        window_size=None if window is None else (window - 1, 0),
    )


def _starcoder2_fields(settings: ModelDescription) -> dict[str, Any]:
    fields = _plain_fields(settings, "norm_epsilon")
    del fields["partial_rotary_factor"]
    window = settings.window_size
    return {**fields, "sliding_window": None if window is None else window[0] + 1}


def _with_biases(rules: Iterable[WeightRule], parts: tuple[str, ...]) -> list[WeightRule]:
    """Return `rules` and rules of biases for parameters whose names contain one of `parts`."""
    found = list(rules)
    biases = [
        replace(
            rule,
            megatron_name=rule.megatron_name.removesuffix("weight") + "bias",
            hf_names=tuple(name.removesuffix("weight") + "bias" for name in rule.hf_names),
        )
        for rule in found
        if any(part in rule.megatron_name for part in parts)
    ]
    return found + biases


def _without_gate(rules: Iterable[WeightRule], name: str = "up_proj") -> list[WeightRule]:
    """Return `rules` with one tensor for the first layer of the MLP."""
    return with_others(rules, identity(_FC1, f"{_HF}mlp.{name}.weight"))


def _starcoder2_rules(settings: ModelDescription) -> list[WeightRule]:
    second = identity(_MEGATRON + "mlp.linear_fc2.weight", _HF + "mlp.c_proj.weight")
    rules = with_others(_without_gate(LLAMA.rules(settings), "c_fc"), second)
    return _with_biases(rules, ("norm", "linear_"))


def _phi3_settings(config: ConfigFields) -> ModelDescription:
    rope, context = rope_parameters(config), config.take(_CONTEXT, 4096)
    kind = rope.get("rope_type") or rope.pop("type", None)
    if kind in _LONG and "long_factor" not in rope:
        config.with_fields({"rope_type": kind}).only("rope_type", "longrope with its factors")
        config = config.with_fields({"rope_parameters": None, "rope_scaling": None})
    elif kind in _LONG:
        rope |= {"rope_type": _LONG[0], _CONTEXT: context}
        config = config.with_fields({"rope_parameters": rope, "rope_scaling": None})
    return MISTRAL.settings(config)


def _phi3_fields(settings: ModelDescription) -> dict[str, Any]:
    context = settings.max_position_embeddings
    if settings.rotary_long_factors:
        context = settings.original_max_position_embeddings
    return {
        **{name: value for name, value in MISTRAL.fields(settings).items() if name != "head_dim"},
        "partial_rotary_factor": settings.rotary_percent,
        _CONTEXT: context,
        "pad_token_id": None,
    }


def _apertus_rules(settings: ModelDescription) -> list[WeightRule]:
    names = {"input_layernorm": "attention_layernorm",
             "post_attention_layernorm": "feedforward_layernorm"}  # fmt: skip
    activation = [
        replace(
            identity(f"{_MEGATRON}mlp.activation_func.{name}", f"{_HF}mlp.act_fn.{name}"),
            is_number=name in ("beta", "eps"),
        )
        for name in ("alpha_p", "alpha_n", "beta", "eps")
    ]
    return [*renamed(_without_gate(LLAMA.rules(settings)), names), *activation]


def _relative(name: str, architecture: str, **changes: Any) -> Family:
    """Return a family that differs from Llama in some parts."""
    changes.setdefault("absent", {})
    return replace(LLAMA, model_type=name, architecture=f"{architecture}ForCausalLM", **changes)


SEED_OSS = _relative(
    "seed_oss",
    "SeedOss",
    settings=_seed_oss_settings,
    fields=_seed_oss_fields,
    only={**GATED, "attention_out_bias": False},
    unused=("residual_dropout",),
    absent={"num_key_value_heads": 8, "head_dim": 128, "attention_dropout": 0.1},
)
ERNIE4_5 = _relative(
    "ernie4_5",
    "Ernie4_5",
    settings=lambda config: replace(LLAMA.settings(config), rotary_interleaved=True),
    only={**LLAMA.only, "use_bias": False},
    absent={"num_key_value_heads": 2, "head_dim": 128, "rope_theta": 500_000.0,
            "tie_word_embeddings": True},
)  # fmt: skip
SMOLLM3 = _relative(
    "smollm3",
    "SmolLM3",
    settings=_smollm3_settings,
    fields=_smollm3_fields,
    only={**LLAMA.only, "use_sliding_window": False},
    unused=("sliding_window", "layer_types"),
    absent={"num_key_value_heads": 4, "rope_theta": 2_000_000.0, "tie_word_embeddings": True},
)
CWM = _relative(
    "cwm",
    "Cwm",
    settings=_cwm_settings,
    fields=_windowed_fields,
    absent={
        "num_key_value_heads": 8, "head_dim": 128, "sliding_window": 8192,
        "rope_theta": 1_000_000.0, "rope_parameters": {
            "rope_type": "llama3", "rope_theta": 1_000_000.0, "factor": 16.0,
            "low_freq_factor": 1.0, "high_freq_factor": 4.0,
            "original_max_position_embeddings": 8192,
        },
    },
)  # fmt: skip
MINISTRAL = _relative(
    "ministral",
    "Ministral",
    settings=_ministral_settings,
    fields=_windowed_fields,
    absent={"num_key_value_heads": 8, "sliding_window": 4096},
)
ARCEE = _relative(
    "arcee",
    "Arcee",
    settings=lambda config: replace(LLAMA.settings(config), swiglu=False, squared_relu=True),
    rules=lambda settings: _without_gate(LLAMA.rules(settings)),
    only={**LLAMA.only, "hidden_act": "relu2"},
)
STABLELM = _relative(
    "stablelm",
    "StableLm",
    settings=_stablelm_settings,
    fields=_stablelm_fields,
    rules=lambda settings: _with_biases(LLAMA.rules(settings), ("norm",)),
    only={"hidden_act": "silu", "qk_layernorm": False, "use_parallel_residual": False},
    unused=("hidden_dropout",),
    absent={"num_key_value_heads": 32, "partial_rotary_factor": 0.25},
)
NEMOTRON = _relative(
    "nemotron",
    "Nemotron",
    settings=_nemotron_settings,
    fields=lambda model: {**_plain_fields(model, "norm_eps"), "head_dim": model.head_dim},
    rules=lambda settings: _with_biases(_without_gate(LLAMA.rules(settings)), ("norm",)),
    only={**LLAMA.only, "hidden_act": "relu2"},
    absent={"partial_rotary_factor": 0.5},
)
STARCODER2 = _relative(
    "starcoder2",
    "Starcoder2",
    settings=_starcoder2_settings,
    fields=_starcoder2_fields,
    rules=_starcoder2_rules,
    only={"hidden_act": "gelu_pytorch_tanh", "use_bias": True},
    unused=("residual_dropout", "embedding_dropout", "mlp_type", "norm_type", "layer_types"),
    absent={"num_key_value_heads": 2, "tie_word_embeddings": True},
)
INTERNLM3 = _relative(
    "internlm3",
    "InternLM3",
    only={**LLAMA.only, "qkv_bias": False, "bias": False},
    absent={"num_key_value_heads": 2, "head_dim": 128},
)
IQUESTCODER = _relative(
    "iquestcoder",
    "IQuestCoder",
    only={**LLAMA.only, "use_sliding_window": False},
    absent={"num_key_value_heads": 8, "head_dim": 128},
)
APERTUS = _relative(
    "apertus",
    "Apertus",
    settings=lambda config: replace(
        LLAMA.settings(config), swiglu=False, xielu=True, qk_layernorm=True
    ),
    rules=_apertus_rules,
    only={"hidden_act": "xielu", "attention_bias": False},
    unused=("post_norm", "qk_norm", "mlp_bias"),
    absent={"rope_theta": 12_000_000.0, "rope_parameters": {
        "rope_type": "llama3", "rope_theta": 12_000_000.0, "factor": 8.0, "low_freq_factor": 1.0,
        "high_freq_factor": 4.0, "original_max_position_embeddings": 8192,
    }},
)  # fmt: skip
PHI3 = replace(
    MISTRAL,
    model_type="phi3",
    architecture="Phi3ForCausalLM",
    settings=_phi3_settings,
    fields=_phi3_fields,
    rules=lambda settings: with_others(MISTRAL.rules(settings), *_PHI3_FUSED),
    # Dropout, and fields of Phi-4-mini that Transformers' model ignores.
    unused=("embd_pdrop", "resid_pdrop", "interpolate_factor", "full_attn_mod"),
    absent={},
)
FAMILIES = (
    SEED_OSS,
    ERNIE4_5,
    SMOLLM3,
    CWM,
    MINISTRAL,
    ARCEE,
    STABLELM,
    NEMOTRON,
    STARCODER2,
    INTERNLM3,
    IQUESTCODER,
    APERTUS,
)
