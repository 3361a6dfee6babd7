"""Command R and Command A: attention and MLP read one norm, which has no bias.

Adjacent channels rotate. In Command A and R7B (`cohere2`) the layers with a window rotate, and the
others do not.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from megatron.hugging_face.config_fields import ConfigFields
from megatron.hugging_face.families.family import window_fields, with_window
from megatron.hugging_face.families.llama import LLAMA
from megatron.hugging_face.model_description import ModelDescription
from megatron.hugging_face.weight_map import WeightRule

_MLP_NORM = "mlp.linear_fc1.layer_norm_weight"


def _settings(config: ConfigFields) -> ModelDescription:
    epsilon = config.take("layer_norm_eps", 1e-5)
    settings = LLAMA.settings(config.with_fields({"rms_norm_eps": epsilon}))
    return replace(
        settings,
        normalization="LayerNormWithoutBias",
        rotary_interleaved=True,
        use_parallel_residual=True,
        share_parallel_norm=True,
        logits_scaling=1.0 / config.take("logit_scale", 0.0625),
    )


def _fields(settings: ModelDescription) -> dict[str, Any]:
    fields = LLAMA.fields(settings)
    fields["layer_norm_eps"] = fields.pop("rms_norm_eps")
    return {**fields, "logit_scale": 1.0 / settings.logits_scaling}


def _windowed_settings(config: ConfigFields) -> ModelDescription:
    settings = _settings(config)
    period = config.take("_sliding_window_pattern", 4)
    period = config.take("sliding_window_pattern", period)
    usual = [(n + 1) % period != 0 for n in range(settings.num_layers)]
    settings = with_window(settings, config, usual)
    if settings.window_size is None:
        return replace(settings, position_embedding_type="none")
    return replace(settings, no_rope_freq=[int(not has_it) for has_it in settings.windowed_layers])


def _rules(settings: ModelDescription) -> list[WeightRule]:
    return [rule for rule in LLAMA.rules(settings) if not rule.megatron_name.endswith(_MLP_NORM)]


COHERE = replace(
    LLAMA,
    model_type="cohere",
    architecture="CohereForCausalLM",
    settings=_settings,
    fields=_fields,
    rules=_rules,
    only={**LLAMA.only, "use_qk_norm": False},
    absent={"rope_theta": 500_000.0, "tie_word_embeddings": True},
)
COHERE2 = replace(
    COHERE,
    model_type="cohere2",
    architecture="Cohere2ForCausalLM",
    settings=_windowed_settings,
    fields=lambda settings: {**_fields(settings), **window_fields(settings)},
    only=LLAMA.only,
    absent={"sliding_window": 4096, "tie_word_embeddings": True},
)
FAMILIES = (COHERE, COHERE2)
