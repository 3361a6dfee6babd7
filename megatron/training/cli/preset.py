"""Settings of a published model, for --preset."""

from __future__ import annotations

from typing import Any

import torch.nn.functional as F

from megatron.core.activations import fast_gelu
from megatron.core.models.gpt.presets import preset

_RENAMED = {"layernorm_epsilon": "norm_epsilon"}
_SAME = (
    "num_layers", "hidden_size", "num_attention_heads", "kv_channels", "ffn_hidden_size",
    "normalization", "add_bias_linear", "add_qkv_bias", "qk_layernorm", "hidden_dropout",
    "attention_dropout", "window_size",
)  # fmt: skip


def preset_values(name: str) -> dict[str, Any]:
    """Return field name -> value for a published model.

    Raises:
        ConfigError: there is no such preset; the message lists similar names.
    """
    found = preset(name)
    config, model = dict(found.config), dict(found.model)
    values: dict[str, Any] = {n: config.pop(n) for n in _SAME if n in config}
    values |= {flag: config.pop(n) for n, flag in _RENAMED.items() if n in config}
    groups = config.pop("num_query_groups", None)
    if groups is not None and groups != found.config["num_attention_heads"]:
        values |= {"group_query_attention": True, "num_query_groups": groups}
    activation, is_gated = (
        config.pop("activation_func", F.gelu),
        config.pop("gated_linear_unit", False),
    )
    values |= {"swiglu": is_gated, "openai_gelu": activation is fast_gelu}

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
    assert not config and not model, f"preset {name} has fields without a flag: {config} {model}"
    values["vocab_size"] = found.vocab_size
    return values
