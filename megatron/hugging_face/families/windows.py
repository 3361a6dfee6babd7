"""Layers with and without a sliding window, as configs of Transformers list them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from megatron.hugging_face.config_fields import ConfigFields
from megatron.hugging_face.families.family import Settings, windowed_layers

SLIDING, FULL = "sliding_attention", "full_attention"


def window_settings(config: ConfigFields, usual: Sequence[bool]) -> dict[str, Any]:
    """Return the settings of the window.

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
    return {
        "window_size": None if window is None else (window - 1, 0),
        "window_attn_skip_freq": None if window is None else pattern,
    }


def window_fields(settings: Settings) -> dict[str, Any]:
    """Return the fields of the window."""
    window = settings.get("window_size")
    kinds = [SLIDING if windowed and window else FULL for windowed in windowed_layers(settings)]
    return {
        "sliding_window": None if window is None else window[0] + 1,
        "layer_types": kinds,
    }
