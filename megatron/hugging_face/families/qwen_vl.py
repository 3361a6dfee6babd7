"""Qwen2.5-VL, Qwen3-VL and Qwen3.5: the decoders of Qwen 2, 3 and 3.5 with an encoder of images.

S. Bai et al., "Qwen2.5-VL Technical Report", arXiv 2502.13923; "Qwen3-VL Technical Report", arXiv
2511.21631.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

from megatron.core.foundation.errors import ConfigError
from megatron.hugging_face.config_fields import ConfigFields
from megatron.hugging_face.families.family import Family
from megatron.hugging_face.families.llama import QWEN2, QWEN3
from megatron.hugging_face.families.qwen3_next import QWEN3_5, QWEN3_5_MOE
from megatron.hugging_face.model_description import ModelDescription
from megatron.hugging_face.rope import rope_parameters
from megatron.hugging_face.weight_map import (
    RowRange,
    WeightRule,
    concat,
    fused_query_key_value,
    identity,
    renamed,
    weight_and_bias,
)

_TOKENS = {
    "image_token_id": 151655,
    "video_token_id": 151656,
    "vision_start_token_id": 151652,
    "vision_end_token_id": 151653,
}
"""Token ids of a config that does not contain them."""
_TOKENS_3_5 = {
    "image_token_id": 248056,
    "video_token_id": 248057,
    "vision_start_token_id": 248053,
    "vision_end_token_id": 248054,
}
_NAMES = {
    "depth": "vision_num_layers",
    "hidden_size": "vision_hidden_size",
    "num_heads": "vision_num_attention_heads",
    "intermediate_size": "vision_ffn_hidden_size",
    "in_channels": "num_channels",
    "patch_size": "patch_dim",
    "temporal_patch_size": "temporal_patch_size",
    "spatial_merge_size": "spatial_merge_size",
}
"""Field of `vision_config` -> setting."""
_OURS, _LAYER = "vision_model.", "vision_model.decoder.layers.{}."


def _text(config: ConfigFields, decoder: Family) -> ModelDescription:
    """Return the decoder's settings, whose fields are in `text_config` or in the config itself."""
    nested = config.take("text_config", None)
    text = config
    if nested is not None:
        text = ConfigFields(nested, f"{config.source} text_config", config.absent)
    rope = rope_parameters(text)
    text = text.without("rope_scaling")
    section, in_turn = rope.pop("mrope_section", None), rope.pop("mrope_interleaved", None)
    for name in ("type", "rope_type"):
        if rope.get(name) == "mrope":
            rope[name] = "default"
    is_tied = config.take("tie_word_embeddings", False)
    if decoder is QWEN2:
        is_tied = text.take("tie_word_embeddings", False) or is_tied
    else:
        text.only("tie_word_embeddings", is_tied)
    whole = text.with_fields({"rope_parameters": rope, "tie_word_embeddings": is_tied})
    settings = decoder.described(whole)
    if nested is not None:
        text.finish()
    if settings.position_embedding_type != "rope":
        raise ConfigError(
            f"{config.source}: positions of kind {rope.get('rope_type')!r} are not supported.",
            rule="positions in time, height and width cannot be scaled",
            flags=["--load-hf"],
            fix="use a model without this scaling",
        )
    return replace(
        settings,
        position_embedding_type="mrope",
        mrope_section=None if section is None else [int(part) for part in section],
        mrope_interleaved=bool(in_turn),
    )


def _vision(config: ConfigFields, hidden_size: int) -> ConfigFields:
    """Return the fields of the encoder."""
    vision = ConfigFields(
        config.take("vision_config"), f"{config.source} vision_config", {"out_hidden_size": 3584}
    )
    rope = ConfigFields(vision.take("rope_parameters", {}), f"{vision.source} rope_parameters")
    rope.only("rope_type", "axial", "default")
    rope.only("rope_theta", 10000.0)
    rope.finish()
    vision.only("out_hidden_size", hidden_size)
    # Transformers ignores these older names.
    vision.only("in_chans", vision.take("in_channels", 3))
    vision.only("spatial_patch_size", vision.take("patch_size"))
    vision.take("tokens_per_second", None)  # for the positions of clips, which samples contain
    return vision


def _sizes(config: ConfigFields, vision: ConfigFields, tokens: Mapping[str, int]) -> dict[str, Any]:
    for name in ("video_token_id", "vision_token_id"):
        config.take(name, None)  # tokens of clips; samples contain still images only
    return {
        "architecture": "vlm",
        **vision.take_all(_NAMES, in_channels=3, temporal_patch_size=2, spatial_merge_size=2),
        **{
            name: config.take(name, tokens[name])
            for name in ("image_token_id", "vision_start_token_id", "vision_end_token_id")
        },
    }


def _qwen2_5_settings(config: ConfigFields) -> ModelDescription:
    settings = _text(config, QWEN2)
    vision = _vision(config, settings.hidden_size)
    vision.only("hidden_act", "silu")
    found = _sizes(config, vision, _TOKENS)
    found["vision_window_size"] = vision.take("window_size", 112)
    found["vision_full_attention_layers"] = list(
        vision.take("fullatt_block_indexes", [7, 15, 23, 31])
    )
    vision.finish()
    settings = replace(settings, **found, vision_model_type="qwen2_5_vl")
    return replace(settings, mrope_section=settings.mrope_section or [16, 24, 24])


def _qwen3_settings(
    config: ConfigFields,
    decoder: Family = QWEN3,
    section: tuple[int, int, int] = (24, 20, 20),
    added: Sequence[int] = (8, 16, 24),
    tokens: Mapping[str, int] = _TOKENS,
) -> ModelDescription:
    """Return the settings of Qwen3-VL, or of another decoder and its defaults."""
    settings = _text(config, decoder)
    vision = _vision(config, settings.hidden_size)
    vision.only("hidden_act", "gelu_pytorch_tanh")
    found = _sizes(config, vision, tokens)
    found["vision_num_position_embeddings"] = vision.take("num_position_embeddings", 2304)
    layers = vision.take("deepstack_visual_indexes", added)
    found["deepstack_layers"] = list(layers if added else ())  # Qwen3.5 ignores the field
    vision.finish()
    settings = replace(settings, **found, vision_model_type="qwen3_vl", mrope_interleaved=True)
    return replace(settings, mrope_section=settings.mrope_section or list(section))


def _fields(settings: ModelDescription, decoder: Family) -> dict[str, Any]:
    text = decoder.exported(replace(settings, position_embedding_type="rope"))
    is_tied = text.pop("tie_word_embeddings")
    rope: dict[str, Any] = {
        "rope_type": "default",
        "rope_theta": text.pop("rope_theta"),
        "mrope_section": settings.mrope_section,
    }
    rope.update(text.pop("rope_scaling") or {})
    if "partial_rotary_factor" in text:
        rope["partial_rotary_factor"] = text.pop("partial_rotary_factor")
    if settings.mrope_interleaved:
        rope["mrope_interleaved"] = True
    return {
        "text_config": {**text, "rope_parameters": rope},
        "vision_config": {
            **settings.fields(_NAMES),
            "out_hidden_size": settings.hidden_size,
        },
        "tie_word_embeddings": is_tied,
        **_TOKENS,
        **{
            name: value
            for name in ("image_token_id", "vision_start_token_id", "vision_end_token_id")
            for value in [getattr(settings, name)]
            if value is not None
        },
    }


def _qwen2_5_fields(settings: ModelDescription) -> dict[str, Any]:
    fields = _fields(settings, QWEN2)
    del fields["text_config"]["head_dim"]  # it follows from hidden_size
    fields["vision_config"] |= {
        "hidden_act": "silu",
        "window_size": settings.vision_window_size,
        "fullatt_block_indexes": settings.vision_full_attention_layers,
    }
    return fields


def _qwen3_fields(settings: ModelDescription, decoder: Family = QWEN3) -> dict[str, Any]:
    fields = _fields(settings, decoder)
    fields["vision_config"] |= {
        "hidden_act": "gelu_pytorch_tanh",
        "num_position_embeddings": settings.vision_num_position_embeddings,
        "deepstack_visual_indexes": settings.deepstack_layers or [],
    }
    return fields


def _projections(settings: ModelDescription, kind: str, hf_name: str) -> WeightRule:
    """Return the rule of queries, keys and values of the encoder, by its number of heads."""
    rule = fused_query_key_value(f"{_LAYER}self_attention.linear_qkv.{kind}", hf_name)
    heads = settings.vision_num_attention_heads
    of_vision = replace(
        settings,
        num_attention_heads=heads,
        group_query_attention=False,
        kv_channels=settings.vision_hidden_size // heads,
    )

    def row_map(_model: ModelDescription, heights: Sequence[int]) -> list[RowRange]:
        return rule.row_map(of_vision, heights)

    return replace(rule, row_map=row_map)


def _linear(ours: str, *theirs: str) -> list[WeightRule]:
    """Return the rules of the weight and bias of a layer."""
    return [
        concat(f"{ours}.{kind}", *(f"{name}.{kind}" for name in theirs))
        for kind in ("weight", "bias")
    ]


def _encoder(settings: ModelDescription, theirs: str, mlp: Mapping[str, Sequence[str]]) -> Any:
    """Return the rules that both encoders share.

    Args:
        mlp: Megatron's layer -> Hugging Face's layers.
    """
    block = f"{theirs}blocks.{{}}."
    rules = [
        *(_projections(settings, kind, f"{block}attn.qkv.{kind}") for kind in ("weight", "bias")),
        *_linear(f"{_LAYER}self_attention.linear_proj", f"{block}attn.proj"),
    ]
    for ours, names in mlp.items():
        rules += _linear(f"{_LAYER}mlp.{ours}", *(f"{block}mlp.{name}" for name in names))
    has_bias = settings.vision_model_type != "qwen2_5_vl"  # its norms have a weight only
    for number, layer in enumerate(("self_attention.linear_qkv", "mlp.linear_fc1"), start=1):
        norm = weight_and_bias(f"{_LAYER}{layer}.layer_norm_", f"{block}norm{number}")
        rules += norm[: 1 + has_bias]
    layers = tuple(range(settings.vision_num_layers))
    embedding = identity(f"{_OURS}patch_embed.weight", f"{theirs}patch_embed.proj.weight")
    return [*(replace(rule, layers=layers) for rule in rules), embedding]


def _qwen2_5_rules(settings: ModelDescription) -> list[WeightRule]:
    theirs = "visual."
    mlp = {"linear_fc1": ("gate_proj", "up_proj"), "linear_fc2": ("down_proj",)}
    return [
        *QWEN2.rules(settings),
        *_encoder(settings, theirs, mlp),
        identity(f"{_OURS}merger.norm.weight", f"{theirs}merger.ln_q.weight"),
        *_linear(f"{_OURS}merger.linear_fc1", f"{theirs}merger.mlp.0"),
        *_linear(f"{_OURS}merger.linear_fc2", f"{theirs}merger.mlp.2"),
    ]


def _qwen3_rules(settings: ModelDescription, decoder: Family = QWEN3) -> list[WeightRule]:
    theirs = "model.visual."
    mlp = {name: (name,) for name in ("linear_fc1", "linear_fc2")}
    rules = _encoder(settings, theirs, mlp)
    rules += [
        identity(f"{_OURS}patch_embed.bias", f"{theirs}patch_embed.proj.bias"),
        identity(f"{_OURS}pos_embed.weight", f"{theirs}pos_embed.weight"),
    ]
    mergers = {"merger": "merger"} | {
        f"deepstack_mergers.{n}": f"deepstack_merger_list.{n}"
        for n in range(len(settings.deepstack_layers or ()))
    }
    for ours, name in mergers.items():
        for layer in ("norm", "linear_fc1", "linear_fc2"):
            rules += _linear(f"{_OURS}{ours}.{layer}", f"{theirs}{name}.{layer}")
    return [*renamed(decoder.rules(settings), {"model.": "model.language_model."}), *rules]


QWEN2_5_VL = Family(
    model_type="qwen2_5_vl",
    architecture="Qwen2_5_VLForConditionalGeneration",
    settings=_qwen2_5_settings,
    fields=_qwen2_5_fields,
    rules=_qwen2_5_rules,
    absent={"num_key_value_heads": 8, "rope_theta": 1_000_000.0},
    without_meaning=(r".*rotary_emb\.inv_freq",),
)
QWEN3_VL = replace(
    QWEN2_5_VL,
    model_type="qwen3_vl",
    architecture="Qwen3VLForConditionalGeneration",
    settings=_qwen3_settings,
    fields=_qwen3_fields,
    rules=_qwen3_rules,
    absent={"num_key_value_heads": 32, "head_dim": 128, "rope_theta": 500_000.0},
)


def _qwen3_5(decoder: Family, model_type: str, architecture: str) -> Family:
    """Return the family of a decoder of Qwen3.5 with the encoder of Qwen3-VL, without DeepStack."""
    return replace(
        QWEN3_VL,
        model_type=model_type,
        architecture=architecture,
        settings=partial(
            _qwen3_settings, decoder=decoder, section=(11, 11, 10), added=(), tokens=_TOKENS_3_5
        ),
        fields=partial(_qwen3_fields, decoder=decoder),
        rules=partial(_qwen3_rules, decoder=decoder),
        absent=decoder.absent,
        left_out=decoder.left_out,
    )


QWEN3_5_VL = _qwen3_5(QWEN3_5, "qwen3_5", "Qwen3_5ForConditionalGeneration")
QWEN3_5_MOE_VL = _qwen3_5(QWEN3_5_MOE, "qwen3_5_moe", "Qwen3_5MoeForConditionalGeneration")
