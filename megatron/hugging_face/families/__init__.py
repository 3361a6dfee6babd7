"""The supported families of models, one short file each."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from megatron.core.foundation.errors import ConfigError
from megatron.hugging_face.families import (
    bert,
    cohere,
    deepseek,
    deepseek4,
    deepseek_relatives,
    experts,
    falcon_h1,
    gated_heads,
    gemma,
    gemma3n,
    gemma4,
    glm,
    gpt2,
    gpt_neox,
    gpt_oss,
    granite,
    hunyuan,
    hunyuan4,
    kimi_linear,
    lfm2,
    llama,
    llama4,
    mimo,
    ministral,
    mistral_large4,
    nanochat,
    olmo,
    qwen3_next,
    qwen_vl,
    relatives,
    routed,
    sarvam,
    state_space,
    t5,
)
from megatron.hugging_face.families.family import Family
from megatron.hugging_face.model_description import ModelDescription, differences

FAMILIES: tuple[Family, ...] = (
    gpt2.GPT2,
    llama.LLAMA,
    llama.MISTRAL,
    llama.QWEN2,
    llama.QWEN3,
    relatives.PHI3,
    gpt_neox.GPT_NEOX,
    gemma.GEMMA2,
    gemma.GEMMA3,
    gemma3n.GEMMA3N,
    gemma4.GEMMA4,
    experts.MIXTRAL,
    experts.QWEN3_MOE,
    deepseek.DEEPSEEK_V2,
    deepseek.DEEPSEEK_V3,
    deepseek.DEEPSEEK_V32,
    deepseek.GLM_MOE_DSA,
    deepseek4.DEEPSEEK_V4,
    hunyuan4.HY_V4,
    kimi_linear.KIMI_LINEAR,
    kimi_linear.BAILING_HYBRID,
    kimi_linear.GLM5_NEXT,
    gpt_oss.GPT_OSS,
    experts.QWEN2_MOE,
    gpt2.GPT_BIGCODE,
    gemma.GEMMA,
    glm.GLM,
    glm.GLM4,
    glm.GLM4_MOE,
    glm.DOTS1,
    glm.SOLAR_OPEN,
    *deepseek_relatives.FAMILIES,
    qwen3_next.QWEN3_NEXT,
    qwen3_next.QWEN3_5,
    qwen3_next.QWEN3_5_MOE,
    qwen3_next.LARA_MINI,
    experts.MELLUM,
    experts.FLINT,
    llama4.LLAMA4,
    mimo.MIMO_V2_FLASH,
    *gated_heads.FAMILIES,
    *relatives.FAMILIES,
    bert.BERT,
    bert.MEGATRON_BERT,
    t5.T5,
    qwen_vl.QWEN2_5_VL,
    qwen_vl.QWEN3_VL,
    qwen_vl.QWEN3_5_VL,
    qwen_vl.QWEN3_5_MOE_VL,
    *state_space.FAMILIES,
    falcon_h1.FALCON_H1,
    *granite.FAMILIES,
    *olmo.FAMILIES,
    *routed.FAMILIES,
    *sarvam.FAMILIES,
    *ministral.FAMILIES,
    mistral_large4.MISTRAL_LARGE4,
    nanochat.NANOCHAT,
    *lfm2.FAMILIES,
    *hunyuan.FAMILIES,
    *cohere.FAMILIES,
)
"""An export tries them in this order."""


_SAME_AS = {
    "kimi_k2": "deepseek_v3", "glm5_next_text": "glm5_next", "minimax_m3_vl_text": "minimax_m3_vl",
    "mistral_large4_text": "mistral_large4",
}  # fmt: skip
"""Type of published files without a class of a causal model in Transformers -> type with the same
model."""
_WITH_IMAGES: dict[str, dict[str, Any]] = {
    "gemma3": {"model_type": "gemma3_text"},
    "gemma3n": {"model_type": "gemma3n_text"},
    "gemma4": {"model_type": "gemma4_text"},
    "mistral3": {"model_type": "mistral"},
    "kimi_k25": {"model_type": "deepseek_v3"},
    "qwen3_5": {"model_type": "qwen3_5_text"},
    "qwen3_5_moe": {"model_type": "qwen3_5_moe_text"},
    "step3p7": {"model_type": "step3p5"},
    "glm5_next": {"model_type": "glm5_next"},
    "mistral_large4": {"model_type": "mistral_large4"},
    "minimax_m3_vl": {"model_type": "minimax_m3_vl"},
}
"""Type of a model with images -> fields of its language model that `text_config` may lack."""
_WITH_ENCODER = ("qwen3_5", "qwen3_5_moe")
"""Those of these types whose encoder is supported."""
_UNTIED = {"glm5_next": False, "mistral_large4": False, "minimax_m3_vl": True}
"""Type whose head is not tied unless the config states it -> whether `text_config` may state it."""
_IGNORED = {"gemma3": {"final_logit_softcapping": None}}
"""Type of a model with images -> fields that Transformers applies in the language model alone."""
_OF_IMAGES = {
    "text_config", "vision_config", "image_token_index", "image_token_id", "boi_token_index",
    "eoi_token_index", "mm_tokens_per_image", "projector_hidden_act", "vision_feature_layer",
    "multimodal_projector_bias", "spatial_merge_size", "video_token_id", "vision_start_token_id",
    "vision_end_token_id", "audio_config", "boi_token_id", "eoi_token_id", "boa_token_id",
    "eoa_token_id", "eoa_token_index", "audio_token_id", "audio_soft_tokens_per_image",
    "vision_soft_tokens_per_image",
    "projection_hidden_size", "projection_layer_norm_eps",
    "image_start_token_id", "image_end_token_id", "video_start_token_id", "video_end_token_id",
    "video_token_index", "merged_hidden_size", "projector_hidden_size",
}  # fmt: skip
"""Fields of such a config that do not affect the language model."""
_LANGUAGE_NAMES = {
    r"^language_model\.lm_head": "lm_head",
    r"^(model\.)?language_model\.(model\.)?": "model.",
    r"^model\.blocks\.": "model.layers.",  # in files of Kimi that Transformers 5.23 writes
}
_IMAGE_WEIGHTS = {
    r"(model\.)?(vision_tower|visual|(mm|multi_modal)_projector)\..*": "the encoder of images",
    r"(model\.)?(audio_tower|embed_(vision|audio))\..*": "the encoder of sound",
}


def family_of_config(
    fields: Mapping[str, Any], source: str, *, reads_images: bool = False
) -> tuple[Family, Mapping[str, Any]]:
    """Return the family of a `config.json`, and the fields that it reads.

    Of most models with images, these are the family and the fields of the language model.

    Args:
        reads_images: return the family of the whole model, if there is one.
    Raises:
        ConfigError: the `model_type` of the file is not supported.
    """
    outer = str(fields.get("model_type"))
    kind = fields.get("model_type")
    reads_text = outer in _WITH_IMAGES and not (reads_images and outer in _WITH_ENCODER)
    if reads_text:
        text = {**_WITH_IMAGES[outer], **(fields.get("text_config") or {})}
        text |= _IGNORED.get(outer, {})
        others = {name: value for name, value in fields.items() if name not in _OF_IMAGES}
        # Transformers ties the head by the field of the whole model.
        is_tied = fields.get("tie_word_embeddings", outer not in _UNTIED)
        is_tied = is_tied or (_UNTIED.get(outer, False) and text.get("tie_word_embeddings"))
        tied = {"tie_word_embeddings": is_tied}
        fields = {**others, **text, **tied}
        kind = text["model_type"]
    kind = _SAME_AS.get(str(kind), kind)
    for family in FAMILIES:
        if family.model_type == kind and (not reads_text or kind == outer):
            return family, fields
        if family.model_type == kind:
            names, images = family.other_names, family.left_out
            names, images = {**names, **_LANGUAGE_NAMES}, {**images, **_IMAGE_WEIGHTS}
            return replace(family, other_names=names, left_out=images), fields
    known = ", ".join([*(family.model_type for family in FAMILIES), *_SAME_AS, *_WITH_IMAGES])
    raise ConfigError(
        f"{source}: model_type {kind!r} is not supported.",
        rule=f"the supported types are {known}",
        flags=["--load-hf"],
        fix="use a model of one of these types",
    )


def family_of_settings(settings: ModelDescription, preferred: object = None) -> Family:
    """Return the first family that can express a model of these settings exactly.

    Args:
        preferred: `model_type` of the family that is tried first.
    Raises:
        ConfigError: no family can express it; the differences are listed for each family.
    """
    if settings.architecture != "vlm":
        preferred = _WITH_IMAGES.get(str(preferred), {}).get("model_type", preferred)
    reasons = []
    for family in sorted(FAMILIES, key=lambda family: family.model_type != preferred):
        wrong = family_misfit(family, settings)
        if not wrong:
            return family
        reasons.append(f"{family.model_type}: {', '.join(wrong[:4])}")
    raise ConfigError(
        "no family of Transformers' models can express this model: " + "; ".join(reasons) + ".",
        rule="an exported model must have the logits of the trained model",
        fix="train a model of one of these families to export it",
    )


def family_misfit(family: Family, settings: ModelDescription) -> list[str]:
    """Return the settings that an export as this family and an import would change, in words."""
    config = family.config(family.exported(settings), "the exported config")
    try:
        return differences(settings, family.described(config))
    except ConfigError as error:
        return [str(error).splitlines()[0]]


__all__ = ["FAMILIES", "Family", "family_misfit", "family_of_config", "family_of_settings"]
