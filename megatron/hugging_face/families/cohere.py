"""Command R and Command A: attention and MLP read one norm, which has no bias.

Adjacent channels rotate. In Command A and R7B (`cohere2`) the layers with a window rotate, and the
others do not. In `cohere2_moe`, layers have experts, except for some that may rotate as well.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from megatron.hugging_face.config_fields import ConfigFields
from megatron.hugging_face.families.deepseek import with_expert_layers
from megatron.hugging_face.families.experts import OF_BALANCE, mlp_kinds, with_mlp_kinds
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


def _moe_settings(config: ConfigFields) -> ModelDescription:
    first, epsilon = config.take("first_k_dense_replace", 0), config.take("rms_norm_eps", None)
    prefix, period = (
        config.take(f"{kind}sliding_window_pattern", count)
        for kind, count in (("prefix_dense_", 1), ("", 4))
    )
    model = _settings(
        config if epsilon is None else config.with_fields({"layer_norm_eps": epsilon})
    )
    layers = range(model.num_layers)
    model = with_window(
        model,
        config,
        [(n + 1) % prefix != 0 if n < first else (n - first + 1) % period != 0 for n in layers],
    )
    width, num_shared = model.ffn_hidden_size, config.take("num_shared_experts", 0)
    averages = config.only("shared_expert_combination_strategy", "average", "sum") != "sum"
    model = replace(
        model,
        normalization="LayerNormWithoutBias" if epsilon is None else "RMSNorm",
        ffn_hidden_size=config.take("prefix_dense_intermediate_size", width),
        num_moe_experts=config.take("num_experts", 8),
        moe_ffn_hidden_size=width,
        moe_layer_freq=[int(n >= first) for n in layers],
        moe_router_topk=config.take("num_experts_per_tok", 2),
        moe_shared_expert_intermediate_size=width * num_shared or None,
        moe_average_shared_expert=averages and num_shared > 0,
    )
    if config.only("expert_selection_fn", "softmax", "sigmoid") == "sigmoid":
        config.only("norm_topk_prob", True)
        model = replace(model, moe_router_score_function="sigmoid")
    config.take("norm_topk_prob", None)  # a softmax over the chosen experts is normed
    model = with_mlp_kinds(model, config)
    rotates = zip(model.windowed_layers, model.has_experts, strict=True)
    skips = [int(not has_one and (routed or prefix != 1)) for has_one, routed in rotates]
    return replace(model, no_rope_freq=skips)


def _moe_fields(settings: ModelDescription) -> dict[str, Any]:
    fields = {**_fields(settings), **window_fields(settings)}
    width, shared = settings.experts_width, settings.moe_shared_expert_intermediate_size or 0
    skips = settings.no_rope_freq or [0] * settings.num_layers
    forced = [n for n, windowed in enumerate(settings.windowed_layers) if not windowed | skips[n]]
    return {
        **fields,
        "rms_norm_eps": settings.layernorm_epsilon if settings.normalization == "RMSNorm" else None,
        "intermediate_size": width,
        "prefix_dense_intermediate_size": settings.ffn_hidden_size,
        "prefix_dense_sliding_window_pattern": 1 if forced else 2,
        "num_experts": settings.num_moe_experts or 1,
        "num_experts_per_tok": settings.moe_router_topk,
        "num_shared_experts": shared // width,
        "shared_expert_combination_strategy": (
            "average" if settings.moe_average_shared_expert else "sum"
        ),
        "expert_selection_fn": settings.moe_router_score_function,
        "norm_topk_prob": True,
        "mlp_layer_types": mlp_kinds(settings),
    }


def _moe_rules(settings: ModelDescription) -> list[WeightRule]:
    has_shared = settings.moe_shared_expert_intermediate_size
    return [
        rule
        for rule in with_expert_layers(_rules(settings), settings)
        if not rule.megatron_name.endswith("pre_mlp_layernorm.weight")
        and (has_shared or ".shared_experts." not in rule.megatron_name)
    ]


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
COHERE2_MOE = replace(
    COHERE2,
    model_type="cohere2_moe",
    architecture="Cohere2MoeForCausalLM",
    settings=_moe_settings,
    fields=_moe_fields,
    rules=_moe_rules,
    only={**LLAMA.only, "partial_rotary_factor": 1.0},
    unused=OF_BALANCE,
    absent={"head_dim": 128, "sliding_window": 4096, "tie_word_embeddings": True},
)
FAMILIES = (COHERE, COHERE2, COHERE2_MOE)
