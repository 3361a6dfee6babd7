"""nanochat: norms without weights, also after the embedding, and a squared ReLU without a gate.

Heads rotate by the negative angle: with its two halves exchanged a head rotates by the positive
one, and scores and norms do not depend on the order of channels.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from megatron.hugging_face.config_fields import ConfigFields
from megatron.hugging_face.families.llama import LLAMA, gated_settings, projections
from megatron.hugging_face.model_description import ModelDescription
from megatron.hugging_face.rope import with_rope
from megatron.hugging_face.weight_map import RowRange, WeightRule, identity, renamed, with_others

_FC1 = "decoder.layers.{}.mlp.linear_fc1.weight"
_SOFTCAP = "final_logit_softcapping"


def _settings(config: ConfigFields) -> ModelDescription:
    settings = replace(
        gated_settings(config),
        normalization="RMSNormWithoutWeight",
        embed_layernorm=True,
        qk_layernorm=True,
        qk_layernorm_after_rope=True,
        squared_relu=True,
        final_logit_softcapping=config.take(_SOFTCAP, None),
    )
    return with_rope(settings, config)


def _fields(settings: ModelDescription) -> dict[str, Any]:
    return {**LLAMA.fields(settings), _SOFTCAP: settings.final_logit_softcapping}


def _with_halves_exchanged() -> WeightRule:
    rule = projections("weight")

    def row_map(model: ModelDescription, heights: Sequence[int]) -> list[RowRange]:
        half, found = model.head_dim // 2, list[RowRange]()
        for rows in rule.row_map(model, heights):
            if rows.source == 2:  # values
                found.append(rows)
                continue
            for row in range(0, rows.length, half):
                other = row + half * (1 if row // half % 2 == 0 else -1)
                begins = rows.begin + other, rows.megatron_begin + row
                found.append(RowRange(rows.source, *begins, half))
        return found

    return replace(rule, row_map=row_map)


def _rules(settings: ModelDescription) -> list[WeightRule]:
    first = identity(_FC1, "model.layers.{}.mlp.fc1.weight")
    rules = with_others(LLAMA.rules(settings), first, _with_halves_exchanged())
    kept = [rule for rule in rules if "norm" not in rule.megatron_name]
    return renamed(kept, {"mlp.down_proj": "mlp.fc2"})


NANOCHAT = replace(
    LLAMA,
    model_type="nanochat",
    architecture="NanoChatForCausalLM",
    settings=_settings,
    fields=_fields,
    rules=_rules,
    only={"hidden_act": "relu2", "attention_bias": False},
    absent={_SOFTCAP: 15.0},
)
