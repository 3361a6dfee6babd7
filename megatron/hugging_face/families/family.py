"""The description of a family of models."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Container, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar

from megatron.core.foundation.errors import ConfigError
from megatron.hugging_face.config_fields import ConfigFields
from megatron.hugging_face.model_description import ModelDescription
from megatron.hugging_face.rope import FULL, SLIDING, rope_fields
from megatron.hugging_face.weight_map import WeightRule

T = TypeVar("T")


def full_name(name: str, prefix: str) -> str:
    """Return the name in the file; a leading slash means that the name has no prefix."""
    return name[1:] if name.startswith("/") else prefix + name


@dataclass(frozen=True)
class Family:
    """One model type of Transformers.

    `settings` and `fields` are inverse: a model can be exported as this family if converting its
    settings to fields and back leaves them unchanged.
    """

    model_type: str
    architecture: str
    """Transformers' class for language modelling, as the config names it."""
    settings: Callable[[ConfigFields], ModelDescription]
    """Convert the other fields of a `config.json` to settings; every field is taken or refused."""
    fields: Callable[[ModelDescription], dict[str, Any]]
    """Convert settings to the other fields of a `config.json`."""
    rules: Callable[[ModelDescription], list[WeightRule]]
    only: Mapping[str, Any] = field(default_factory=dict)
    """Field -> its one supported value."""
    unused: tuple[str, ...] = ()
    """Fields that do not affect logits: of training, of kernels, or repeated by other fields."""
    absent: Mapping[str, Any] = field(default_factory=dict)
    """Field -> Transformers' value if a config does not contain it, where null has another meaning.
    """
    prefixes: tuple[str, ...] = ("",)
    """Possible prefixes of all names in the files; exports use the first one."""
    without_meaning: tuple[str, ...] = ()
    """Patterns of tensors in older files that are not weights."""
    copies: Mapping[str, str] = field(default_factory=dict)
    """Tensor that files may contain -> the tensor whose values it repeats."""
    other_names: Mapping[str, str] = field(default_factory=dict)
    """Pattern of a name in other files -> its replacement."""
    around: Mapping[str, Any] = field(default_factory=dict)
    """Fields around `text_config`, with an encoder of images as small as possible: of families
    whose language model has no class of its own in Transformers."""
    left_out: Mapping[str, str] = field(default_factory=dict)
    """Pattern of weights that are not read -> their description; `{num_layers}` is replaced by the
    number of layers."""

    zero_if_absent: Mapping[str, str] = field(default_factory=dict)
    """End of the names of vectors that files may lack, and that are zero then -> the setting with
    their number of elements."""

    def in_own_names(self, stored: Mapping[str, T]) -> dict[str, T]:
        """Return tensors by the names that the rules use, given the names in a file."""
        for pattern, written in self.other_names.items():
            stored = {re.sub(pattern, written, name): value for name, value in stored.items()}
        return dict(stored)

    def prefix(self, names: Container[str], first: str) -> str:
        """Return the prefix in a file.

        Args:
            names: of the tensors in the file.
            first: name, without prefix, of a tensor that every model has.
        """
        known = [prefix for prefix in self.prefixes if full_name(first, prefix) in names]
        return known[0] if known else self.prefixes[0]

    def config(self, fields: Mapping[str, object], source: str) -> ConfigFields:
        """Return the fields of a `config.json` of this family, as the argument of `settings`."""
        return ConfigFields(fields, source, self.absent)

    def described(self, config: ConfigFields) -> ModelDescription:
        """Return the settings of a config; the config collects the problems of its fields."""
        for name in self.unused:
            config.take(name, None)
        for name, value in self.only.items():
            config.only(name, value)
        config.check_quantization()
        return self.settings(config)

    def exported(self, settings: ModelDescription) -> dict[str, Any]:
        """Return the fields of a `config.json` for a model."""
        return {**self.only, **self.fields(settings)}

    def read(self, fields: Mapping[str, object], source: str) -> ModelDescription:
        """Return the settings that a `config.json` of this family describes.

        Raises:
            ConfigError: the model is not supported; all reasons are listed.
        """
        config = self.config(fields, source)
        try:
            settings = self.described(config)
        except (TypeError, ValueError, LookupError, AttributeError, ArithmeticError) as error:
            config.finish()
            raise ConfigError(
                f"{source} has a field with a value of the wrong type: {error}.",
                rule="fields have the types that Transformers writes",
                flags=["--load-hf"],
                fix="download or save the model again",
            ) from error
        config.finish()
        return settings


SIZES = {
    "num_hidden_layers": "num_layers",
    "hidden_size": "hidden_size",
    "num_attention_heads": "num_attention_heads",
    "intermediate_size": "ffn_hidden_size",
    "max_position_embeddings": "max_position_embeddings",
    "vocab_size": "unpadded_vocab_size",
}
"""Field -> setting, in most families."""


def with_window(
    model: ModelDescription, config: ConfigFields, usual: Sequence[bool]
) -> ModelDescription:
    """Return `model` with the attention window of the config.

    Args:
        usual: whether each layer has the window if the config does not list the layers.
    """
    kinds = config.take("layer_types", None)
    pattern = [int(has_it) for has_it in usual]
    if kinds is not None and set(kinds) <= {SLIDING, FULL}:
        pattern = [int(kind == SLIDING) for kind in kinds]
    elif kinds is not None:
        config.only("layer_types", [SLIDING, FULL])
    window = config.take("sliding_window", None)
    if window is None:
        return model
    return replace(model, window_size=(window - 1, 0), window_attn_skip_freq=pattern)


def with_blocks(
    model: ModelDescription,
    attention: Sequence[Mapping[str, object]],
    ffn: Sequence[Mapping[str, object]],
) -> ModelDescription:
    """Return `model` with settings by layer, without the sizes that equal the model's sizes."""

    # The factor on the scores depends on the width of a head: a layer states it again. A base of a
    # layer is not scaled, even if it equals the model's base.
    again = {"softmax_scale", *(["rotary_base"] if rope_fields(model)["rope_scaling"] else [])}

    def own(settings: Mapping[str, object]) -> dict[str, object]:
        return {
            name: value
            for name, value in settings.items()
            if name in again or value != getattr(model, name)
        }

    blocks = [
        {"attention": own(one), "ffn": own(other)}
        for one, other in zip(attention, ffn, strict=True)
    ]
    has_own = any(part for block in blocks for part in block.values())
    text = json.dumps({"block_configs": blocks}) if has_own else None
    return replace(model, heterogeneous_layers_config_encoded_json=text)


def sizes_of_layers(
    config: ConfigFields, names: Mapping[str, str], usual: Mapping[str, Mapping[str, object]]
) -> Callable[[int], dict[str, Any]]:
    """Return a function of the number of a layer, from 0: its settings in `per_layer_config`.

    Args:
        names: field of a layer -> setting.
        usual: the value of `per_layer_config` if it is absent: number of a layer -> its fields.
    """
    stated = config.take("per_layer_config", usual)
    if {name for fields in stated.values() for name in fields} - names.keys():
        config.only("per_layer_config")
    return lambda n: {names[name]: size for name, size in stated.get(str(n), {}).items()}


def fields_of_layers(model: ModelDescription, names: Mapping[str, str]) -> dict[str, Any]:
    """Return `per_layer_config`, the inverse of `sizes_of_layers`."""
    return {
        str(n): {name: block.settings[own] for name, own in names.items() if own in block.settings}
        for n, block in enumerate(model.blocks)
    }


def window_fields(settings: ModelDescription) -> dict[str, Any]:
    """Return the fields of the attention window."""
    window = settings.window_size
    kinds = [SLIDING if windowed and window else FULL for windowed in settings.windowed_layers]
    return {
        "sliding_window": None if window is None else window[0] + 1,
        "layer_types": kinds,
    }
