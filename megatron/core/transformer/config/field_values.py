"""The values that a field may have, whatever the other fields are: a range, or some words."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import fields
from typing import Any

from megatron.core.foundation.errors import ConfigError, MegatronError
from megatron.core.settings.flags import default_of, kebab, metadata_of

_RANGES: dict[str, tuple[Callable[[float], bool], tuple[str, ...]]] = {
    "it is a positive number": (
        lambda value: 0 < value < math.inf,
        (
            "num_layers", "hidden_size", "num_attention_heads", "kv_channels",
            "mup_base_hidden_size", "mup_width_mult", "mup_base_head_dim", "mup_attn_scale_power",
            "mup_embedding_mult", "mup_output_mult", "attn_logit_softcapping",
            "final_logit_softcapping", "embedding_multiplier", "residual_multiplier",
            "logits_scaling", "window_attn_skip_freq", "linear_attention_freq", "q_lora_rank",
            "kv_lora_rank", "qk_head_dim", "qk_pos_emb_head_dim", "v_head_dim",
            "latent_norm_epsilon", "dsa_indexer_n_heads", "dsa_indexer_topk", "qk_clip_threshold",
            "fp8_amax_history_len", "mlp_chunks_for_training", "num_moe_experts",
            "moe_latent_size", "moe_layer_freq", "moe_shared_expert_intermediate_size",
            "moe_expert_capacity_factor", "moe_expert_rank_capacity_factor",
            "linear_conv_kernel_dim", "linear_key_head_dim", "linear_value_head_dim",
            "linear_num_key_heads", "linear_num_value_heads", "mamba_state_dim", "mamba_head_dim",
            "mamba_num_groups",
        ),
    ),
    "it is not negative": (
        lambda value: 0 <= value < math.inf,
        (
            "dsa_indexer_loss_coeff", "mtp_num_layers", "mtp_loss_scaling_factor",
            "num_layers_at_start_in_bf16", "num_layers_at_end_in_bf16", "cuda_graph_warmup_steps",
        ),
    ),
    "it is in [0, 1)": (
        lambda value: 0 <= value < 1,
        ("hidden_dropout", "attention_dropout", "moe_z_loss_coeff", "moe_input_jitter_eps"),
    ),
    "it is in [0, 1]": (lambda value: 0 <= value <= 1, ("qk_clip_alpha",)),
}  # fmt: skip
"""Rule -> (its test, the fields that it holds for).

Sizes that may be derived from other sizes, as the heads of Mamba-2, are checked with their layers.
"""


def value_problems(config: Any) -> Iterator[MegatronError]:
    """Yield the fields of a new config, before any are derived, whose value is out of range or is
    not one of the flag's choices."""
    known = {field.name: field for field in fields(config)}
    for rule, (fits, names) in _RANGES.items():
        for name in names:
            value, default = getattr(config, name), default_of(known[name])
            if not isinstance(value, (int, float)) or fits(value):
                continue
            spelling = _spelling(known[name])
            fix = f"leave {spelling} out" if default is None else f"use {spelling} {default}"
            is_required = isinstance(default, (int, float)) and not fits(default)
            yield ConfigError(
                f"{name}={value}.",
                rule=rule,
                flags=[spelling],
                fix=f"set {spelling}" if is_required else fix,
            )
    for name, field in known.items():
        metadata, value = metadata_of(field), getattr(config, name)
        if metadata.values or not metadata.choices or not isinstance(value, str):
            continue
        if value not in metadata.choices or value in metadata.refuse_values:
            refused = metadata.refuse_values
            choices = [str(choice) for choice in metadata.choices if choice not in refused]
            yield ConfigError(
                f"{name}={value!r} is unknown.",
                rule=f"known are {', '.join(choices)}",
                flags=[_spelling(field)],
                fix=refused.get(value) or f"use {_spelling(field)} {choices[-1]}",
            )


def _spelling(field: Any) -> str:
    metadata = metadata_of(field)
    return (metadata.spellings or (kebab(metadata.name or field.name),))[0]
