"""Build the config of the model from settings."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

import torch
import torch.nn.functional as F
from torch import nn

from megatron.core.models.model_settings import (
    ExpertSettings,
    LatentAttentionSettings,
    ModelSettings,
)
from megatron.core.settings.flags import arg_name, from_args
from megatron.core.settings.inert_flags import inert_fields
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.training.config.optimizer import PrecisionSettings
from megatron.training.config.parallelism import ParallelismSettings

ConfigT = TypeVar("ConfigT", bound=TransformerConfig)


def activation_of(model: ModelSettings) -> tuple[Callable[..., Any], bool]:
    """Return the MLP's activation function and whether the MLP is gated."""
    from megatron.core.activations import fast_gelu, quick_gelu, squared_relu
    from megatron.core.transformer.xielu import XIELU

    if model.swiglu:
        return F.silu, True
    if model.quick_geglu:
        return quick_gelu, True
    if model.geglu:
        return fast_gelu, True
    if model.squared_relu:
        return squared_relu, False
    if model.xielu:
        return XIELU, False
    if model.relu:
        return F.relu, False
    if model.openai_gelu:
        return fast_gelu, False
    return F.gelu, False


def transformer_config(
    model: ModelSettings,
    latent_attention: LatentAttentionSettings,
    experts: ExpertSettings,
    parallelism: ParallelismSettings,
    precision: PrecisionSettings,
    extra: Mapping[str, Any],
) -> TransformerConfig:
    """Build the model's config from groups of settings.

    Args:
        extra: arguments of a script; names that are not fields of the config are ignored.
    Raises:
        ConfigError: the model or its layout is invalid; the error lists all problems.
    """
    known = {field.name for field in dataclasses.fields(TransformerConfig)}
    found = {name: value for name, value in extra.items() if name in known}
    for group in (model, latent_attention, experts, parallelism, precision):
        for field in dataclasses.fields(group):
            value = getattr(group, field.name)
            if field.name in known and value is not None:
                found[field.name] = value
    found["pipeline_dtype"] = precision.params_dtype
    found["variable_seq_lengths"] = parallelism.hybrid_context_parallel
    return TransformerConfig(**_composed(found, model, precision))


def _composed(
    found: dict[str, Any], model: ModelSettings, precision: PrecisionSettings
) -> dict[str, Any]:
    """Add the fields that depend on several settings."""
    if len(found.get("cp_comm_type", ())) == 1:
        found["cp_comm_type"] = found["cp_comm_type"][0]
    found["activation_func"], found["gated_linear_unit"] = activation_of(model)
    found["bias_activation_fusion"] = (
        precision.bias_swiglu_fusion if model.swiglu else precision.bias_gelu_fusion
    )
    if model.init_method_xavier_uniform:
        found["init_method"] = found["output_layer_init_method"] = nn.init.xavier_uniform_
    is_fp32 = found.get("params_dtype", torch.float32) == torch.float32
    if is_fp32 or precision.fp32_residual_connection:
        found.pop("pipeline_dtype", None)  # the config derives it
    return found


def transformer_config_from_args(
    args: Mapping[str, object], config_class: type[ConfigT] | None = None
) -> ConfigT:
    """Build a config of `config_class` from Megatron's names and values of settings.

    Args:
        args: a missing setting has the config's default.
    """
    kind: Any = config_class or TransformerConfig
    found: dict[str, Any] = {}
    for field in dataclasses.fields(kind):
        setting = "params_dtype" if field.name == "pipeline_dtype" else arg_name(field)
        if field.name not in _NOT_SETTINGS and args.get(setting) is not None:
            found[field.name] = args[setting]
    model, precision = from_args(ModelSettings, args), from_args(PrecisionSettings, args)
    # The run has already warned of inert fields, so they are set after the config's checks.
    unused = {row.name: found.pop(row.name) for row in inert_fields(kind) if row.name in found}
    config: ConfigT = kind(**_composed(found, model, precision))
    for name, value in unused.items():
        setattr(config, name, value)
    return config


_NOT_SETTINGS = ("timers", "init_method", "activation_func", "max_position_embeddings")
