"""Settings of a published model, for --preset."""

from __future__ import annotations

import dataclasses
from typing import Any

import torch.nn.functional as F

from megatron.core.activations import fast_gelu, quick_gelu
from megatron.core.models.gpt.presets import preset
from megatron.core.settings.flags import arg_name
from megatron.core.transformer.transformer_config import TransformerConfig

_ACTIVATIONS = {
    (fast_gelu, False): "openai_gelu", (F.silu, True): "swiglu", (quick_gelu, True): "quick_geglu",
}  # fmt: skip
"""Activation, and whether it is a gate -> the flag."""


def preset_values(name: str) -> dict[str, Any]:
    """Return field name -> value for a published model.

    Raises:
        ConfigError: there is no such preset; the message lists similar names.
    """
    found = preset(name)
    config, model = dict(found.config), dict(found.model)
    groups = config.pop("num_query_groups", None)
    activation = config.pop("activation_func"), config.pop("gated_linear_unit", False)
    name_of = {field.name: arg_name(field) for field in dataclasses.fields(TransformerConfig)}
    values: dict[str, Any] = {name_of[n]: value for n, value in config.items()}
    values[_ACTIVATIONS[activation]] = True
    if groups is not None and groups != found.config["num_attention_heads"]:
        values |= {"group_query_attention": True, "num_query_groups": groups}
    values["position_embedding_type"] = model.pop("position_embedding_type")
    values["max_position_embeddings"] = model.pop("max_sequence_length")
    tied = model.pop("share_embeddings_and_output_weights")
    values["untie_embeddings_and_output_weights"] = not tied
    if "rotary_base" in model:
        values["rotary_base"] = int(model.pop("rotary_base"))
    if model.pop("rope_scaling", False):
        values |= {
            "use_rope_scaling": True,
            "rope_scaling_factor": model.pop("rope_scaling_factor"),
        }
    assert not model, f"preset {name} has arguments without a flag: {model}"
    values["vocab_size"] = found.vocab_size
    return values
