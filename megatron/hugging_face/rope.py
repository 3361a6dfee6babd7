"""Read and write the fields of rotary positions in a `config.json`, older and newer."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from megatron.core.transformer.yarn import yarn_attention_factor
from megatron.hugging_face.config_fields import ConfigFields
from megatron.hugging_face.model_description import ModelDescription

SLIDING, FULL = "sliding_attention", "full_attention"
"""Kinds of layers in configs: with and without a window."""


def with_rope(
    model: ModelDescription,
    config: ConfigFields,
    *,
    base_name: str = "rope_theta",
    percent_name: str = "partial_rotary_factor",
) -> ModelDescription:
    """Return `model` with the rotary positions of older fields or of `rope_parameters`.

    Args:
        base_name, percent_name: names of the base and of the rotated fraction in older configs of
            the family, which have the scaling in `rope_scaling`.
    """
    found = rope_parameters(config)
    for name, older, default in (
        ("rope_theta", base_name, 10000.0),
        ("partial_rotary_factor", percent_name, 1.0),
    ):
        value = config.one_of((f"rope_parameters.{name}", found.get(name)), older)
        found[name] = config.absent.get(name, default) if value is None else value
    return with_rope_parameters(model, found, f"rope_scaling in {config.source}")


def rope_parameters(config: ConfigFields) -> dict[str, Any]:
    """Return `rope_parameters`, named `rope_scaling` in older configs."""
    found = config.one_of("rope_parameters", "rope_scaling")
    return dict(found or config.absent.get("rope_parameters", {}))


def with_rope_by_window(
    model: ModelDescription,
    config: ConfigFields,
    *,
    base: float,
    local_base: float,
    local_base_name: str | None = None,
) -> ModelDescription:
    """Return `model` with rotary positions that differ in layers with a window.

    Args:
        base, local_base: the default bases of layers without and with a window.
        local_base_name: field of the local base in older configs.
    """
    by_kind = config.take("rope_parameters", {})
    newer = by_kind.get(FULL, by_kind if "rope_theta" in by_kind else None)
    full = dict(config.one_of(("rope_parameters", newer), "rope_scaling") or {})
    local = ConfigFields(by_kind.get(SLIDING) or {}, f"rope_parameters of windows, {config.source}")
    older = [] if local_base_name is None else [local_base_name]
    local_base = config.one_of(("rope_theta", local.stated("rope_theta")), *older) or local_base
    for name in ("rope_type", "type"):
        local.only(name, "default")
    local.finish()
    nested = ("rope_parameters.rope_theta", full.get("rope_theta"))
    full["rope_theta"] = config.one_of(nested, "rope_theta") or base
    model = with_rope_parameters(model, full, f"rope_parameters in {config.source}")
    is_whole = float(local_base).is_integer()
    return replace(model, rotary_base_local=int(local_base) if is_whole else local_base)


def rope_by_kind(
    model: ModelDescription, config: ConfigFields, usual: Mapping[str, Mapping[str, object]]
) -> dict[str, ModelDescription]:
    """Return `model` with the rotary positions of each kind of layers.

    Args:
        usual: kind -> its `rope_parameters`, for fields that the config does not contain.
    """
    stated = config.take("rope_parameters", {})
    return {
        kind: with_rope_parameters(
            model,
            {**fields, **(stated.get(kind) or {})},
            f"rope_parameters of {kind} in {config.source}",
            in_angles=True,
        )
        for kind, fields in usual.items()
    }


def with_rope_by_kind(
    model: ModelDescription, config: ConfigFields, usual: Mapping[str, Mapping[str, object]]
) -> tuple[ModelDescription, dict[str, Any]]:
    """Return `model` with the rotary positions of its layers without a window, and the settings of
    a block (`layer_sizes`) that give layers with a window their own ones; see `rope_by_kind`."""
    found = rope_by_kind(model, config, usual)
    local = found[SLIDING]
    own: dict[str, Any] = {
        "rotary_base": local.rotary_base, "rotary_percent": local.rotary_percent,
    }  # fmt: skip
    if local != replace(model, position_embedding_type="rope", **own):
        config.only("rope_parameters")
    return found[FULL], own


def rope_fields_by_kind(
    model: ModelDescription, usual: Mapping[str, Mapping[str, object]]
) -> dict[str, Any]:
    """Return the config fields of rotary positions, the inverse of `rope_by_kind`."""
    found = {kind: {"rope_type": "default", **fields} for kind, fields in usual.items()}
    whole = {"rotary_base": model.rotary_base, "rotary_percent": model.rotary_percent}
    of_layers = [(FULL, whole)] + [
        (SLIDING if has_window and model.window_size else FULL, whole | model.block(n).rotary)
        for n, has_window in enumerate(model.windowed_layers, 1)
    ]
    for kind, own in of_layers:
        found[kind] |= {
            "rope_theta": float(own["rotary_base"]),
            "partial_rotary_factor": own["rotary_percent"],
        }
    found[FULL] |= rope_fields(model)["rope_scaling"] or {}
    return {"rope_parameters": found}


def with_rope_parameters(
    model: ModelDescription, fields: Mapping[str, object], source: str, *, in_angles: bool = False
) -> ModelDescription:
    """Return `model` with the rotary positions of one `rope_parameters`.

    Args:
        in_angles: YaRN's temperature multiplies cosine and sine, so that layers with other rotary
            positions do not have it.
    Raises:
        ConfigError: the scaling is not supported.
    """
    scaling = ConfigFields(fields, source)
    base = scaling.take("rope_theta")
    kind = scaling.take("rope_type", None) or scaling.take("type", "default")
    scaling.take("type", None)
    model = replace(
        model,
        position_embedding_type="rope",
        rotary_base=int(base) if float(base).is_integer() else base,
        rotary_percent=scaling.take("partial_rotary_factor", 1.0),
    )
    if kind == "llama3":
        factor = float(scaling.take("factor"))
        model = replace(model, use_rope_scaling=True, rope_scaling_factor=factor)
        scaling.absent["original_max_position_embeddings"] = model.max_position_embeddings
        scaling.only("low_freq_factor", 1.0)
        scaling.only("high_freq_factor", 4.0)
        scaling.only("original_max_position_embeddings", 8192)
    elif kind == "proportional":
        scaling.only("factor", 1.0)
        model = replace(model, rotary_proportional=True)
    elif kind == "linear":
        model = replace(model, rotary_seq_len_interpolation_factor=scaling.take("factor"))
    elif kind == "dynamic":
        scaling.take("factor", None)  # without effect up to the length of the model
    elif kind == "yarn":
        model = _with_yarn(model, scaling, in_angles)
    elif kind == "longrope":
        model = _with_longrope(model, scaling)
    else:
        scaling.only("rope_type", "default")
        scaling.only("type", "default")
    scaling.finish()
    return model


def _with_longrope(model: ModelDescription, scaling: ConfigFields) -> ModelDescription:
    """Return `model` with the settings of LongRoPE, whose amplitude is read as in Transformers."""
    context = scaling.take("original_max_position_embeddings", model.max_position_embeddings)
    factor = scaling.take("factor", model.max_position_embeddings / context)
    usual = 1.0 if factor <= 1.0 else math.sqrt(1 + math.log(factor) / math.log(context))
    return replace(
        model,
        original_max_position_embeddings=context,
        rotary_short_factors=scaling.take("short_factor"),
        rotary_long_factors=scaling.take("long_factor"),
        rotary_amplitude=float(scaling.take("attention_factor", usual)),
    )


def _with_yarn(model: ModelDescription, scaling: ConfigFields, in_angles: bool) -> ModelDescription:
    """Return `model` with the settings of YaRN, whose temperature is read as in Transformers."""
    # If both strengths are set, the temperature depends on them, else on the factor alone.
    mscale, of_all = scaling.take("mscale", 0.0), scaling.take("mscale_all_dim", 0.0)
    if of_all and not mscale:
        scaling.only("mscale_all_dim")
    strengths = (float(mscale), float(of_all)) if of_all else (1.0, 0.0)
    of_rotated, of_head = (
        yarn_attention_factor(float(scaling.take("factor")), strength) for strength in strengths
    )
    if in_angles or model.rotary_percent != 1.0:
        # The temperature is a factor on the channels that rotate, not on all scores.
        amplitude = float(scaling.take("attention_factor", of_rotated / of_head))
        scale, strengths = model.softmax_scale or model.head_dim**-0.5, (1.0, 0.0)
        model = replace(model, rotary_amplitude=amplitude, softmax_scale=scale)
    else:
        scaling.only("attention_factor", of_rotated / of_head)
    return replace(
        model,
        position_embedding_type="yarn",
        rotary_scaling_factor=float(scaling.take("factor")),
        # If the original length is absent, Transformers uses the length of the model.
        original_max_position_embeddings=scaling.take(
            "original_max_position_embeddings", model.max_position_embeddings
        ),
        beta_fast=float(scaling.take("beta_fast", 32)),
        beta_slow=float(scaling.take("beta_slow", 1)),
        yarn_correction_range_round_to_int=bool(scaling.take("truncate", True)),
        mscale=strengths[0],
        mscale_all_dim=strengths[1],
    )


def _yarn_fields(model: ModelDescription) -> dict[str, Any]:
    fields = {
        "rope_type": "yarn",
        "factor": float(model.rotary_scaling_factor),
        "original_max_position_embeddings": model.original_max_position_embeddings,
        "beta_fast": float(model.beta_fast),
        "beta_slow": float(model.beta_slow),
        "truncate": model.yarn_correction_range_round_to_int,
    }
    if model.rotary_percent != 1.0 or model.rotary_amplitude != 1.0:
        fields["attention_factor"] = model.rotary_amplitude
    if model.mscale_all_dim:
        fields |= {"mscale": float(model.mscale), "mscale_all_dim": float(model.mscale_all_dim)}
    return fields


def rope_fields_by_window(model: ModelDescription) -> dict[str, Any]:
    """Return the config fields of rotary positions that differ in layers with a window."""
    fields = rope_fields(model)
    base = fields.pop("rope_theta")
    full = {"rope_type": "default", **(fields.pop("rope_scaling") or {}), "rope_theta": base}
    local = {"rope_type": "default", "rope_theta": float(model.rotary_base_local or base)}
    return {"rope_parameters": {FULL: full, SLIDING: local}}


def rope_fields(model: ModelDescription) -> dict[str, Any]:
    """Return the config fields of rotary positions, in the older, widely supported form."""
    fields: dict[str, Any] = {"rope_theta": float(model.rotary_base), "rope_scaling": None}
    if model.use_rope_scaling:
        fields["rope_scaling"] = {
            "rope_type": "llama3",
            "factor": model.rope_scaling_factor,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 8192,
        }
    elif model.rotary_long_factors:
        fields["rope_scaling"] = {
            "rope_type": "longrope",
            "short_factor": model.rotary_short_factors,
            "long_factor": model.rotary_long_factors,
            "attention_factor": model.rotary_amplitude,
            "original_max_position_embeddings": model.original_max_position_embeddings,
        }
    elif model.position_embedding_type == "yarn" or (
        model.multi_latent_attention and model.rotary_scaling_factor != 1.0
    ):
        fields["rope_scaling"] = _yarn_fields(model)
    elif model.rotary_seq_len_interpolation_factor:
        factor = float(model.rotary_seq_len_interpolation_factor)
        fields["rope_scaling"] = {"rope_type": "linear", "factor": factor}
    return fields
