"""From settings to the configs of `megatron.core`: which field takes which flag."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

import torch
import torch.nn.functional as F
from torch import nn

from megatron.core.flags import arg_name
from megatron.core.transformer.transformer_config import TransformerConfig

ConfigT = TypeVar("ConfigT", bound=TransformerConfig)

_NOT_SETTINGS = ("timers", "init_method", "activation_func")


def activation_of(settings: Mapping[str, Any]) -> tuple[Callable[..., Any], bool]:
    """Return the MLP's nonlinearity and whether it gates."""
    from megatron.core.activations import fast_gelu, quick_gelu, squared_relu

    if settings.get("swiglu"):
        return F.silu, True
    if settings.get("quick_geglu"):
        return quick_gelu, True
    if settings.get("geglu"):
        return fast_gelu, True
    if settings.get("squared_relu"):
        return squared_relu, False
    if settings.get("openai_gelu"):
        return fast_gelu, False
    return F.gelu, False


def transformer_fields(
    settings: Mapping[str, Any], config_class: type = TransformerConfig
) -> dict[str, Any]:
    """Return keyword arguments for `config_class` from settings by Megatron names."""
    found: dict[str, Any] = {}
    for field in dataclasses.fields(config_class):
        setting = "params_dtype" if field.name == "pipeline_dtype" else arg_name(field)
        if field.name not in _NOT_SETTINGS and settings.get(setting) is not None:
            found[field.name] = settings[setting]
    if len(found.get("cp_comm_type", ())) == 1:
        found["cp_comm_type"] = found["cp_comm_type"][0]
    found["activation_func"], found["gated_linear_unit"] = activation_of(settings)
    fuses_activation = (
        settings.get("bias_swiglu_fusion", True)
        if settings.get("swiglu")
        else settings.get("bias_gelu_fusion", True)
    )
    found["bias_activation_fusion"] = fuses_activation
    if settings.get("init_method_xavier_uniform"):
        found["init_method"] = found["output_layer_init_method"] = nn.init.xavier_uniform_
    is_fp32 = found.get("params_dtype", torch.float32) == torch.float32
    if is_fp32 or settings.get("fp32_residual_connection"):
        found.pop("pipeline_dtype", None)  # the config knows it
    return found


def transformer_config(
    settings: Mapping[str, Any], config_class: type[ConfigT] | None = None
) -> ConfigT:
    """Build the model's config.

    Raises:
        ConfigError: with all problems of the model and its layout.
    """
    kind: Any = config_class or TransformerConfig
    return kind(**transformer_fields(settings, kind))
