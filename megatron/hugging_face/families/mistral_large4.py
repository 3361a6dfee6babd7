"""Mistral Large 4 (text): sparse latent attention whose latents some layers share.

Some layers do not rotate; there keys have no part that heads share. Queries grow with the logarithm
of their position (SSMax, arXiv 2501.19399), and rotary frequencies have stored factors. Layers
share the keys of few indexers, as in GLM-5.2. The encoder of images is left out, and so is the
part that predicts later tokens.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from megatron.hugging_face.config_fields import ConfigFields
from megatron.hugging_face.families.deepseek import (
    FOLLOWING,
    SCALES,
    dense_rules,
    indexer_kinds,
    indexer_rules,
    latent_fields,
    latent_settings,
    listed_experts_fields,
    with_expert_layers,
    with_listed_experts,
    with_shared_keys,
)
from megatron.hugging_face.families.family import Family
from megatron.hugging_face.families.llama import LLAMA
from megatron.hugging_face.model_description import ModelDescription
from megatron.hugging_face.weight_map import WeightRule, identity, renamed

_HERE, _THERE = "decoder.layers.{}.self_attention.", "model.layers.{}.self_attn."
_NAMES = {
    "index_head_dim": "dsa_indexer_head_dim", "index_n_heads": "dsa_indexer_n_heads",
    "index_topk": "dsa_indexer_topk", "final_logit_softcapping": "final_logit_softcapping",
}  # fmt: skip
_ROPE = {
    "rope_type": "yarn", "rope_theta": 1e4, "factor": 2048.0, "attention_factor": 1.0,
    "original_max_position_embeddings": 512, "beta_fast": 32.0, "beta_slow": 1.0,
}  # fmt: skip
_WEIGHTS = {
    "model.embed_tokens.": "tok_embeddings.", "lm_head.": "output.", "model.": "",
    ".self_attn.": ".attention.", ".q_proj.": ".wq.", ".kv_b_proj.": ".wkv_b.", ".o_proj.": ".wo.",
    ".kv_a_proj_with_mqa.": ".wkv_a_with_mqa.", ".kv_a_layernorm.": ".kv_a_norm.",
    ".input_layernorm.": ".attention_norm.", ".post_attention_layernorm.": ".ffn_norm.",
    ".mlp.gate.": ".gate.", ".mlp.experts.": ".experts.", ".mlp.shared_": ".shared_",
    ".mlp.": ".feed_forward.", ".gate_proj.": ".w1.", ".up_proj.": ".w3.", ".down_proj.": ".w2.",
}  # fmt: skip
"""Part of DeepSeek's name of a tensor -> part of the name in files."""


def _settings(config: ConfigFields) -> ModelDescription:
    rope = dict(config.one_of("rope_parameters", "rope_scaling") or _ROPE)
    is_plain = rope.get("attention_factor") == 1.0  # YaRN without its temperature
    if is_plain:
        del rope["attention_factor"]
    known = {"q_lora_rank": None, "rope_parameters": rope, "rope_scaling": None}
    model = latent_settings(config.with_fields(known))
    layers = range(model.num_layers)
    config.only("layer_types", ["indexed_attention"] * model.num_layers)
    interval = config.take("no_rope_layer_interval", 4)
    rotates = config.take("no_rope_layers", [int((n + 1) % interval != 0) for n in layers])
    sources = config.take("kv_source_layers", list(layers))
    last: dict[object, int] = {}  # Transformers keeps the latents of one layer of each kind
    for n, kind in zip(layers, rotates, strict=False):
        if n in sources[n + 1 :]:
            last[kind] = n
        if sources[n] not in (n, last.get(kind)):
            config.only("kv_source_layers", [*sources[:n], last.get(kind, n), *sources[n + 1 :]])
    return replace(
        with_shared_keys(with_listed_experts(model, config), config),
        **config.take_all(_NAMES),
        mscale=0.0 if is_plain else model.mscale,
        latent_norm_epsilon=model.layernorm_epsilon,
        experimental_attention_variant="dsa",
        dsa_indexer_k_norm_epsilon=1e-6,
        dsa_indexer_rope_interleaved=True,
        scalable_softmax=True,
        rotary_exponents=True,
        no_rope_freq=None if all(rotates) else [int(not turns) for turns in rotates],
        no_rope_latent_keys=not all(rotates),
        kv_source_layers=None if sources == list(layers) else sources,
    )


def _fields(model: ModelDescription) -> dict[str, Any]:
    fields = {**latent_fields(model), **listed_experts_fields(model), **model.fields(_NAMES)}
    rope = {"rope_type": "default", **(fields.pop("rope_scaling") or {})}
    if rope["rope_type"] == "yarn" and not model.mscale:
        rope["attention_factor"] = 1.0
    del fields["q_lora_rank"]
    layers = range(1, model.num_layers + 1)
    return {
        **fields,
        "rope_parameters": {**rope, "rope_theta": fields.pop("rope_theta")},
        "indexer_types": indexer_kinds(model),
        "no_rope_layers": [int(model.rotates_in(n)) for n in layers],
        "kv_source_layers": [model.latent_source(n) - 1 for n in layers],
    }


def _rules(model: ModelDescription) -> list[WeightRule]:
    numbers = range(1, model.num_layers + 1)
    turns = [model.rotates_in(n) for n in numbers]
    owns = [model.latent_source(n) == n for n in numbers]
    rules = with_expert_layers(dense_rules(model), model) + indexer_rules(model)
    rules += [
        identity(f"{_HERE}query_scale.{mine}", f"{_THERE}ssmax_scaling.{theirs}")
        for mine, theirs in SCALES.items()
    ]
    # All layers read one tensor.
    rules.append(identity(_HERE + "rotary.exponents", "lerope.alpha"))
    found = []
    for rule in renamed(rules, _WEIGHTS):
        name = rule.megatron_name.removeprefix(_HERE)
        if name.startswith(("linear_kv_", "kv_layernorm", "rotary")):
            has_own = owns if "_down" in name or "norm" in name else [True] * model.num_layers
            kinds = (True,) if "rotary" in name else (True, False)
            found += [
                replace(rule, layers=tuple(n for n, own in enumerate(has_own)
                                           if own and turns[n] == kind))
                for kind in kinds  # their tensors have different shapes
            ]  # fmt: skip
        else:
            found.append(rule)
    return found


MISTRAL_LARGE4 = Family(
    "mistral_large4",
    "MistralLarge4ForConditionalGeneration",
    _settings,
    _fields,
    _rules,
    only={**LLAMA.only, "n_group": 1, "topk_group": 1, "q_lora_rank": None},
    unused=FOLLOWING,
    absent={"num_key_value_heads": 64, "first_k_dense_replace": 1, "index_head_dim": 128,
            "index_n_heads": 32, "index_topk": 2048, "final_logit_softcapping": 30.0},
    without_meaning=LLAMA.without_meaning,
    around={"vision_config": {
        "model_type": "pixtral", "hidden_size": 4, "intermediate_size": 4, "num_hidden_layers": 0,
        "num_attention_heads": 1, "patch_size": 14, "image_size": 28}},
    left_out={
        r"(vision_encoder|pre_mm_projector_norm|patch_merger|vision_language_adapter)\..*":
            "the encoder of images",
        r"mtp_dspark\..*": "the part that predicts later tokens",
    },
)  # fmt: skip
