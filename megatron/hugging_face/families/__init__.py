"""The supported families of models, one short file each."""

from __future__ import annotations

from collections.abc import Mapping

from megatron.core.foundation.errors import ConfigError
from megatron.hugging_face.families import (
    bert,
    deepseek,
    experts,
    gemma,
    glm,
    gpt2,
    gpt_neox,
    gpt_oss,
    granite,
    kimi_linear,
    llama,
    qwen3_next,
    qwen_vl,
    relatives,
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
    experts.MIXTRAL,
    experts.QWEN3_MOE,
    deepseek.DEEPSEEK_V2,
    deepseek.DEEPSEEK_V3,
    deepseek.DEEPSEEK_V32,
    deepseek.GLM_MOE_DSA,
    kimi_linear.KIMI_LINEAR,
    gpt_oss.GPT_OSS,
    experts.QWEN2_MOE,
    gpt2.GPT_BIGCODE,
    gemma.GEMMA,
    glm.GLM,
    glm.GLM4,
    glm.GLM4_MOE,
    glm.DOTS1,
    qwen3_next.QWEN3_NEXT,
    *relatives.FAMILIES,
    bert.BERT,
    bert.MEGATRON_BERT,
    t5.T5,
    qwen_vl.QWEN2_5_VL,
    qwen_vl.QWEN3_VL,
    *state_space.FAMILIES,
    *granite.FAMILIES,
)
"""An export tries them in this order."""


def family_of_config(fields: Mapping[str, object], source: str) -> Family:
    """Return the family of a `config.json`.

    Raises:
        ConfigError: the `model_type` of the file is not supported.
    """
    kind = fields.get("model_type")
    for family in FAMILIES:
        if family.model_type == kind:
            return family
    known = ", ".join(family.model_type for family in FAMILIES)
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
    return differences(settings, family.described(config))


__all__ = ["FAMILIES", "Family", "family_misfit", "family_of_config", "family_of_settings"]
