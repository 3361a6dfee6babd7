"""Sizes and parts that differ by layer, in the JSON that Megatron and Nemotron-NAS models use.

A. Bercovich et al., "Puzzle: Distillation-Based NAS for Inference-Optimized LLMs", section 2, arXiv
2411.19146: a search gives each layer its own number of key/value heads and its own MLP width, or
replaces attention or MLP by one matrix, or leaves it out.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from megatron.core.foundation.errors import ConfigError, MegatronError
from megatron.core.pipeline_parallel.layout import pipeline_layout
from megatron.core.transformer.config.block import SOFTMAX_TYPES
from megatron.core.transformer.config.layer_kinds import DENSE, EXPERTS, LINEAR, NOTHING, LayerKind

if TYPE_CHECKING:
    from megatron.core.transformer.config.shape import ShapeConfig
    from megatron.core.transformer.transformer_config import TransformerConfig

PATH_FLAG = "--heterogeneous-layers-config-path"
_FLAGS = [PATH_FLAG, "--heterogeneous-layers-config-encoded-json"]
_NUMBER, _COUNT, _WINDOW = (int, float), (int,), (list, None)
_OF_ATTENTION: Mapping[str, tuple[type | None, ...]] = {
    "num_attention_heads": _COUNT, "num_query_groups": _COUNT, "n_heads_in_group": _COUNT,
    "kv_channels": _COUNT, "softmax_scale": _NUMBER, "window_size": _WINDOW,
    "rotary_base": _NUMBER, "rotary_percent": _NUMBER, "softmax_type": (str,),
    "attention_k_eq_v": (bool,),
}  # fmt: skip
_OF_DENSE = {"ffn_hidden_size": _COUNT, "intermediate_size": _COUNT, "ffn_mult": _NUMBER,
             "activation_sparsity": _NUMBER}  # fmt: skip
_OF_EXPERTS = {
    "num_moe_experts": _COUNT, "moe_ffn_hidden_size": _COUNT, "moe_router_topk": _COUNT,
    "moe_shared_expert_intermediate_size": _COUNT, "moe_activation_func_clamp_value": _NUMBER,
}  # fmt: skip
_OF_MLP = {**_OF_DENSE, **_OF_EXPERTS, "activation_func_clamp_value": (*_NUMBER, None)}
"""Setting of a part of a block -> its types; null is the model's value unless None is a type.
"""
_OF_ROTARY = ("rotary_base", "rotary_percent", "kv_channels")
_REPLACED = {"no_op": NOTHING, "replace_with_linear": LINEAR}
"""Switch of a part of a block -> the kind that replaces the part."""


@dataclass(frozen=True)
class Block:
    """What one layer has in place of the settings of the model."""

    mixer: str | None = None
    """NOTHING or LINEAR, in place of the mixer of the layer's kind."""
    mlp: str | None = None
    settings: Mapping[str, Any] = field(default_factory=dict)

    def kind(self, usual: LayerKind) -> LayerKind:
        """Return the kind of the layer, whose kind without this block is `usual`."""
        mixer = usual.mixer if self.mixer is None else self.mixer
        return replace(usual, mixer=mixer, mlp=usual.mlp if self.mlp is None else self.mlp)

    def changes(self, config: ShapeConfig) -> dict[str, Any]:
        """Return the fields of the layer's config that differ from `config`."""
        found = {n: value for n, value in self.settings.items() if n != "rotary_percent"}
        if "window_size" in found:
            window = found["window_size"]
            found |= {"window_size": window and tuple(window), "window_attn_skip_freq": None}
        if "softmax_scale" in found:
            found["softmax_scale_local"] = None
        if heads_of_group := found.pop("n_heads_in_group", None):
            heads, rest = divmod(
                found.get("num_attention_heads", config.num_attention_heads), heads_of_group
            )
            found["num_query_groups"] = 0 if rest else heads  # 0 is refused
        if "intermediate_size" in found:
            found["ffn_hidden_size"] = found.pop("intermediate_size")
        if multiple := found.pop("ffn_mult", None):
            # The rule of Nemotron-NAS: 2/3 of the multiple, as of a gated MLP, rounded up.
            found["ffn_hidden_size"] = -(-int(2 * multiple * config.hidden_size / 3) // 256) * 256
        return found

    @property
    def rotary(self) -> dict[str, float]:
        """The arguments of `RotaryEmbedding` that differ from the model's arguments."""
        return {name: self.settings[name] for name in _OF_ROTARY if name in self.settings}

    def problems(self, config: TransformerConfig, kind: LayerKind) -> Iterator[MegatronError]:
        """Yield the settings that a layer of this kind would not read or would misread."""
        unread = {DENSE: [*_OF_EXPERTS], EXPERTS: [*_OF_DENSE]}.get(kind.mlp, [])
        if wrong := [name for name in self.settings if name in unread]:
            yield _error(
                f"its block sets {', '.join(wrong)}, and its MLP is {kind.mlp}.",
                "--num-experts and --moe-layer-freq choose the layers with experts, whose width is"
                " moe_ffn_hidden_size",
            )
        if (share := self.settings.get("activation_sparsity", 0.0)) >= 1:
            yield _error(f"its block sets activation_sparsity={share}.", "it is below 1")
        width = self.settings.get("kv_channels", config.kv_channels)
        scales_all = config.softmax_scale is not None and "softmax_scale" not in self.settings
        if width != config.kv_channels and scales_all:
            yield _error(
                f"its block sets kv_channels={width}, and the model has"
                f" softmax_scale={config.softmax_scale}.",
                "the factor on the scores depends on the width of a head",
                "add softmax_scale to the attention of the block",
            )


@dataclass
class LayerSizesConfig:
    """Sizes by layer."""

    heterogeneous_layers_config_path: str | None = None
    """JSON file of sizes by layer, for example the config.json of a Nemotron-NAS model. Its
    block_configs has one block per layer: {"attention": {...}, "ffn": {...}}."""
    heterogeneous_layers_config_encoded_json: str | None = None
    """Text of such a file; checkpoints store it."""

    @property
    def blocks(self) -> tuple[Block, ...]:
        """The block of each layer; empty if all layers have the sizes of the model.

        Raises:
            ConfigError: the JSON cannot be read.
        """
        text = self.heterogeneous_layers_config_encoded_json
        return read_blocks(text) if text else ()

    def block(self, layer_number: int) -> Block:
        """Return the block of a layer, by its 1-based number in the whole model; the layers of
        multi-token prediction, numbered after the last layer, follow the last layer."""
        blocks = self.blocks
        return blocks[min(layer_number, len(blocks)) - 1] if blocks else Block()


def read_file(path: str) -> str:
    """Return the text of a file of sizes by layer.

    Raises:
        ConfigError: the file cannot be read.
    """
    try:
        return Path(path).read_text()
    except (OSError, UnicodeDecodeError) as error:
        raise _error(f"{path}: {error}.", "every rank reads the file") from error


def _error(found: str, rule: str, fix: str = "correct the block_configs") -> ConfigError:
    return ConfigError(found, rule=rule, flags=_FLAGS, fix=fix)


@lru_cache(maxsize=8)
def read_blocks(text: str) -> tuple[Block, ...]:
    """Read the blocks of all layers.

    Raises:
        ConfigError: the text is not JSON of known settings.
    """
    try:
        given = json.loads(text)["block_configs"]
        parts = [(dict(each["attention"]), dict(each["ffn"])) for each in given]
    except (ValueError, LookupError, TypeError) as error:
        raise _error(
            f"the sizes by layer cannot be read: {type(error).__name__}: {error}.",
            'the text is JSON: {"block_configs": [{"attention": {}, "ffn": {}}, ...]}',
        ) from error
    return tuple(_read_block(layer, *both) for layer, both in enumerate(parts, 1))


def _read_block(layer: int, attention: dict[str, Any], mlp: dict[str, Any]) -> Block:
    settings: dict[str, Any] = {}
    replaced: list[str | None] = []
    for part, given, known in (("attention", attention, _OF_ATTENTION), ("ffn", mlp, _OF_MLP)):
        instead = [kind for switch, kind in _REPLACED.items() if given.get(switch)]
        replaced.append(instead[0] if instead else None)
        for name, value in given.items():
            types = known.get(name, ())
            # Nemotron-NAS writes null or false for everything that a layer does not have.
            if name in _REPLACED or not (types or value) or (value is None and None not in types):
                continue
            numbers = value if isinstance(value, list) else [1 if value is None else value]
            if name == "softmax_type":
                numbers = [1 if value in SOFTMAX_TYPES else 0]
            if types == (bool,):
                numbers = [1]
            is_wrong = type(value) not in types and value is not None
            if (
                is_wrong
                or (types != _WINDOW and numbers[0] <= 0)
                or set(map(type, numbers)) - {int, float}
            ):
                raise _error(
                    f"block {layer} has {part}.{name} = {value!r}.",
                    f"the settings of {part} are {', '.join((*_REPLACED, *known))}; sizes are"
                    " positive numbers, a window is [left, right], a softmax_type one of "
                    + ", ".join(SOFTMAX_TYPES),
                )
            if not instead:
                settings[name] = value
    of_attention, of_mlp = replaced
    return Block(of_attention, of_mlp, settings)


def layer_sizes_problems(config: TransformerConfig) -> Iterator[MegatronError]:
    """Yield the problems of the blocks, apart from the sizes of each layer."""
    try:
        blocks = config.blocks
    except ConfigError as error:
        yield error
        return
    if not blocks:
        return
    if len(blocks) != config.num_layers:
        yield _error(
            f"{len(blocks)} blocks for a model of {config.num_layers} layers.",
            "each layer has a block",
            f"use --num-layers {len(blocks)}",
        )
        return
    for flag, is_on in (
        ("--hybrid-layer-pattern", config.hybrid_layer_pattern is not None),
        ("--encoder-num-layers", config.encoder_num_layers is not None),
    ):
        if is_on:
            yield _error(
                f"sizes by layer with {flag}.",
                "blocks describe the layers of a decoder, each with a mixer and an MLP",
                f"drop {flag}, or {PATH_FLAG}",
            )


def key_value_problems(config: TransformerConfig) -> Iterator[MegatronError]:
    """Yield the problems of shared keys and values, in a layer or a model, and of its vectors."""
    given = {"--attention-k-eq-v": config.attention_k_eq_v,
             "--num-kv-shared-layers": config.num_kv_shared_layers > 0,
             "--per-layer-embed-dim": config.per_layer_embed_dim > 0}  # fmt: skip
    asked = [flag for flag, is_on in given.items() if is_on]
    excluded = {"--multi-latent-attention": config.multi_latent_attention,
                "--qk-clip": config.qk_clip, "--v-channels": config.v_channels is not None,
                "--encoder-num-layers": config.encoder_num_layers is not None}  # fmt: skip
    if asked[config.attention_k_eq_v :]:
        excluded |= {
            "--enable-mhc-connections": config.enable_mhc_connections,
            "--pipeline-model-parallel-size": config.pipeline_model_parallel_size > 1,
            "--recompute-granularity": config.recompute_granularity == "full",
            "--mtp-num-layers": bool(config.mtp_num_layers),
            "--hybrid-layer-pattern": config.hybrid_layer_pattern is not None,
            "--experimental-attention-variant": config.experimental_attention_variant is not None,
        }
    wrong = [flag for flag, is_on in excluded.items() if is_on]
    if asked and wrong:
        yield ConfigError(
            f"{', '.join(asked)} with {', '.join(wrong)}.",
            rule="layers exchange keys, values and vectors inside one pass of one stage, and keys"
            " that serve as values have one width and one scale",
            flags=[*asked, *wrong],
            fix=f"drop {', '.join(wrong)}",
        )


def shared_key_value_problems(config: TransformerConfig) -> Iterator[MegatronError]:
    """Yield an error for each layer that finds no earlier layer with fitting keys and values."""
    found: dict[object, tuple[int | None, int | None]] = {}
    for layer in range(1, config.num_layers + 1):
        view = config.of_layer(layer)
        window, sizes = view.window_of(layer), (view.num_query_groups, view.kv_channels)
        if not config.shares_key_value(layer):
            found[window] = sizes
        elif found.get(window) != sizes:
            yield ConfigError(
                f"num_kv_shared_layers={config.num_kv_shared_layers}: layer {layer} has the window"
                f" {window} and key/value heads {sizes}.",
                rule="a layer shares the keys and values of the last earlier layer with its window,"
                " and both have key/value heads of one number and width",
                flags=["--num-kv-shared-layers", "--window-attn-skip-freq"],
                fix="share fewer layers",
            )


def shared_latent_problems(config: TransformerConfig) -> Iterator[MegatronError]:
    """Yield the problems of layers that read the latents of an earlier layer."""
    sources = config.kv_source_layers
    if sources is None:
        return
    name, layout = "--kv-source-layers", pipeline_layout(config)
    if len(sources) != config.num_layers or any(
        not 0 <= source <= layer or sources[source] != source
        for layer, source in enumerate(sources)
    ):
        yield ConfigError(
            f"kv_source_layers={sources} for {config.num_layers} layers.",
            rule="each layer has a source, itself or an earlier layer that is its own source",
            flags=[name, "--num-layers"],
            fix=f'use {name} "{list(range(config.num_layers))}"',
        )
        return
    if config.recompute_granularity == "full":
        yield ConfigError(
            "kv_source_layers with recompute_granularity='full'.",
            rule="gradients of shared latents do not enter a segment that is recomputed",
            flags=[name, "--recompute-granularity"],
            fix="use --recompute-granularity selective",
        )
    stages = [layout.layers(*layout.placement.location(n)) for n in range(len(layout.stages))]
    kinds = config.layer_kinds()
    for layer, source in enumerate(sources):
        stage = next(layers for layers in stages if layer in layers)
        wrong = {
            "are on two pipeline stages": source not in stage,
            "do not both have latent attention": any(
                kinds[n].is_compressed or not kinds[n].attends for n in (layer, source)
            ),
            "do not both rotate, and keys have no shared part in the other one":
                config.no_rope_latent_keys
                and config.rotates_in(layer + 1) != config.rotates_in(source + 1),
        }  # fmt: skip
        for what in (text for text, is_wrong in wrong.items() if is_wrong and source != layer):
            yield ConfigError(
                f"kv_source_layers: the layers {layer} and {source}, its source, {what}.",
                rule="a layer reads the latents of an earlier layer of its stage that has attention"
                " of its kind",
                flags=[name, "--no-rope-freq", "--pipeline-model-parallel-layout"],
                fix="put both layers on one stage and give them one kind, or name the layer"
                " as its own source",
            )
