"""Layers with and without a sliding window, as configs of Transformers list them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from megatron.hugging_face.config_fields import ConfigFields
from megatron.hugging_face.model_description import ModelDescription

SLIDING, FULL = "sliding_attention", "full_attention"


def with_window(
    model: ModelDescription, config: ConfigFields, usual: Sequence[bool]
) -> ModelDescription:
    """Return `model` with the window of the config.

    Args:
        usual: which layers have it where the config does not list them.
    """
    kinds = config.take("layer_types", None)
    pattern = [int(has_it) for has_it in usual]
    if kinds is not None and set(kinds) <= {SLIDING, FULL}:
        pattern = [int(kind == SLIDING) for kind in kinds]
    elif kinds is not None:
        config.only("layer_types", [SLIDING, FULL])
    window = config.take("sliding_window", None)
    if window is None:
        return model
    return replace(model, window_size=(window - 1, 0), window_attn_skip_freq=pattern)


def window_fields(settings: ModelDescription) -> dict[str, Any]:
    """Return the fields of the window."""
    window = settings.window_size
    kinds = [SLIDING if windowed and window else FULL for windowed in settings.windowed_layers]
    return {
        "sliding_window": None if window is None else window[0] + 1,
        "layer_types": kinds,
    }
