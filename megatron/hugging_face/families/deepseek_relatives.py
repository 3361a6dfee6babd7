"""Models with parts of DeepSeek-V3, whose configs list the layers with experts.

Latent attention: GLM-4.7-Flash (`glm4_moe_lite`), A.X K1 (`axk1`), whose experts have a norm of
their output, and Youtu (arXiv 2512.24618), which is dense.
Experts beside grouped heads with norms: HY 3, and K-EXAONE, where the layers without a window do
not rotate. EXAONE 4 is dense, with norms after the branches.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from megatron.hugging_face.config_fields import ConfigFields
from megatron.hugging_face.families.deepseek import (
    DEEPSEEK_V3,
    FOLLOWING,
    LATER_TOKENS,
    dense_rules,
    judged_by_sigmoid,
    latent_fields,
    latent_settings,
    listed_experts_fields,
    with_expert_layers,
    with_listed_experts,
)
from megatron.hugging_face.families.family import window_fields, with_window
from megatron.hugging_face.families.llama import GATED, LLAMA
from megatron.hugging_face.families.olmo import reordered_rules
from megatron.hugging_face.model_description import ModelDescription
from megatron.hugging_face.weight_map import WeightRule, identity, renamed

_HY_NAMES = {
    "num_experts": "n_routed_experts",
    "num_shared_experts": "n_shared_experts",
    "router_scaling_factor": "routed_scaling_factor",
}
_EXAONE_NAMES = {"num_experts": "n_routed_experts", "num_shared_experts": "n_shared_experts"}
"""Field of a family -> DeepSeek's name of the field."""
_HY_WEIGHTS = {
    "mlp.gate.weight": "mlp.router.gate.weight",
    "mlp.gate.e_score_correction_bias": "mlp.expert_bias",
    "mlp.shared_experts.": "mlp.shared_mlp.",
}
_EXAONE_WEIGHTS = {"mlp.gate.e_score_correction_bias": "mlp.e_score_correction_bias"}


def _latent_settings(config: ConfigFields) -> ModelDescription:
    interleaves = config.take("rope_interleave", True)
    return replace(latent_settings(config), rope_interleave=interleaves)


def _latent_fields(settings: ModelDescription) -> dict[str, Any]:
    return {**latent_fields(settings), "rope_interleave": settings.rope_interleave}


def _glm_settings(config: ConfigFields) -> ModelDescription:
    dense = _latent_settings(config)
    config.only("head_dim", dense.qk_pos_emb_head_dim)  # another name of this width
    return judged_by_sigmoid(with_listed_experts(dense, config, num_dense=1), config)


def _glm_fields(settings: ModelDescription) -> dict[str, Any]:
    added = {**listed_experts_fields(settings), "norm_topk_prob": True}
    return {**_latent_fields(settings), **added}


def _axk1_settings(config: ConfigFields) -> ModelDescription:
    model = judged_by_sigmoid(with_listed_experts(_latent_settings(config), config), config)
    return replace(model, moe_output_norm=True)


def _axk1_rules(settings: ModelDescription) -> list[WeightRule]:
    name = "layers.{}.post_mlp_layernorm.weight"
    norm = identity(f"decoder.{name}", f"model.{name}")
    sparse = settings.layers_where(lambda kind: kind.has_experts)
    return [*DEEPSEEK_V3.rules(settings), replace(norm, layers=sparse)]


def _hy_settings(config: ConfigFields) -> ModelDescription:
    usual = config.renamed(_HY_NAMES)
    dense = replace(LLAMA.settings(usual), qk_layernorm=True)
    return replace(
        with_listed_experts(dense, usual, num_dense=1),
        moe_router_score_function="sigmoid",
        moe_router_enable_expert_bias=True,
    )


def _hy_fields(settings: ModelDescription) -> dict[str, Any]:
    fields = {**LLAMA.fields(settings), **listed_experts_fields(settings)}
    del fields["n_group"], fields["topk_group"]
    return fields | {name: fields.pop(usual) for name, usual in _HY_NAMES.items()}


def _exaone_dense_settings(config: ConfigFields) -> ModelDescription:
    dense = replace(LLAMA.settings(config), qk_layernorm=True)
    period = config.take("sliding_window_pattern", 4)
    layers = range(dense.num_layers) if config.take("layer_types", None) is None else ()
    dense = with_window(dense, config, [(n + 1) % period != 0 for n in layers])
    if dense.window_size is not None and not all(dense.windowed_layers):
        dense = replace(dense, no_rope_freq=[int(not has_one) for has_one in dense.windowed_layers])
    return dense


def _exaone_settings(config: ConfigFields) -> ModelDescription:
    usual = config.renamed(_EXAONE_NAMES)
    dense = _exaone_dense_settings(usual)
    return judged_by_sigmoid(with_listed_experts(dense, usual), usual)


def _exaone_fields(settings: ModelDescription) -> dict[str, Any]:
    fields = {**LLAMA.fields(settings), **listed_experts_fields(settings), "norm_topk_prob": True}
    fields |= {name: fields.pop(usual) for name, usual in _EXAONE_NAMES.items()}
    return fields | window_fields(settings)


def _expert_rules(settings: ModelDescription, names: dict[str, str]) -> list[WeightRule]:
    return renamed(with_expert_layers(LLAMA.rules(settings), settings), names)


GLM4_MOE_LITE = replace(
    DEEPSEEK_V3,
    model_type="glm4_moe_lite",
    architecture="Glm4MoeLiteForCausalLM",
    settings=_glm_settings,
    fields=_glm_fields,
    only={**DEEPSEEK_V3.only, "partial_rotary_factor": 1.0},
    unused=("qk_head_dim", "num_nextn_predict_layers"),
    absent={"num_key_value_heads": 20, "q_lora_rank": 768, "routed_scaling_factor": 1.8},
)
AXK1 = replace(
    DEEPSEEK_V3,
    model_type="axk1",
    architecture="AXK1ForCausalLM",
    settings=_axk1_settings,
    fields=_glm_fields,
    rules=_axk1_rules,
    absent={"num_key_value_heads": 64, "q_lora_rank": 1536, "n_group": 8, "topk_group": 4,
            "routed_scaling_factor": 2.5, "first_k_dense_replace": 1},
    zero_if_absent={"e_score_correction_bias": "num_moe_experts"},
    # Published files have this norm also in dense layers, where Transformers does not use it.
    without_meaning=(*LLAMA.without_meaning, r"model\.layers\.\d+\.post_mlp_layernorm\.weight"),
)  # fmt: skip
YOUTU = replace(
    LLAMA,
    model_type="youtu",
    architecture="YoutuForCausalLM",
    settings=_latent_settings,
    fields=_latent_fields,
    rules=dense_rules,
    unused=(*FOLLOWING, "embedding_initializer_range"),
    absent={"num_key_value_heads": 16, "q_lora_rank": 1536, "tie_word_embeddings": True},
)
HY_V3 = replace(
    LLAMA,
    model_type="hy_v3",
    architecture="HYV3ForCausalLM",
    settings=_hy_settings,
    fields=_hy_fields,
    rules=lambda settings: _expert_rules(settings, _HY_WEIGHTS),
    # The first one adds the shared expert in fp32.
    unused=("enable_moe_fp32_combine", "num_nextn_predict_layers"),
    absent={"num_key_value_heads": 8, "head_dim": 128, "rope_theta": 11_158_840.0,
            "router_scaling_factor": 2.826},
    left_out=LATER_TOKENS,
)  # fmt: skip
EXAONE4 = replace(
    LLAMA,
    model_type="exaone4",
    architecture="Exaone4ForCausalLM",
    settings=lambda config: replace(_exaone_dense_settings(config), reordered_norm=True),
    fields=lambda settings: {**LLAMA.fields(settings), **window_fields(settings)},
    rules=reordered_rules,
    only=GATED,
    absent={"num_key_value_heads": 32, "sliding_window": 4096},
)
EXAONE_MOE = replace(
    LLAMA,
    model_type="exaone_moe",
    architecture="ExaoneMoeForCausalLM",
    settings=_exaone_settings,
    fields=_exaone_fields,
    rules=lambda settings: _expert_rules(settings, _EXAONE_WEIGHTS),
    only=GATED,
    unused=("num_nextn_predict_layers",),
    absent={"num_key_value_heads": 32, "sliding_window": 4096, "first_k_dense_replace": 1,
            "routed_scaling_factor": 2.5},
    left_out={r"mtp\..*": "the layers that predict later tokens"},
)  # fmt: skip
FAMILIES = (GLM4_MOE_LITE, AXK1, YOUTU, HY_V3, EXAONE4, EXAONE_MOE)
