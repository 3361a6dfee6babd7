"""What a family of models has to say about itself."""

from __future__ import annotations

from collections.abc import Callable, Container, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from megatron.core.foundation.errors import ConfigError
from megatron.hugging_face.config_fields import ConfigFields
from megatron.hugging_face.model_description import ModelDescription
from megatron.hugging_face.weight_map import WeightRule


def full_name(name: str, prefix: str) -> str:
    """Return the name in the file; a leading slash says that it takes no prefix."""
    return name[1:] if name.startswith("/") else prefix + name


@dataclass(frozen=True)
class Family:
    """One kind of model of Transformers.

    `settings` and `fields` are inverse: a model can be exported as this family if its settings
    come back unchanged.
    """

    model_type: str
    architecture: str
    """Class named in the config for causal language modelling."""
    settings: Callable[[ConfigFields], ModelDescription]
    """From the fields of `config.json`; every field is taken or refused."""
    fields: Callable[[ModelDescription], dict[str, Any]]
    """From settings to the fields of `config.json`."""
    rules: Callable[[ModelDescription], list[WeightRule]]
    absent: Mapping[str, Any] = field(default_factory=dict)
    """Fields -> what they are in Transformers if a config does not name them, where null means
    something else there."""
    prefixes: tuple[str, ...] = ("",)
    """What may be before all names in the files, written first to last."""
    without_meaning: tuple[str, ...] = ()
    """Patterns of tensors that older files hold besides weights."""
    copies: Mapping[str, str] = field(default_factory=dict)
    """Tensors that files may hold -> the one whose values each of them repeats."""
    other_names: Mapping[str, str] = field(default_factory=dict)
    """Patterns of names in other files -> what is written instead."""
    left_out: Mapping[str, str] = field(default_factory=dict)
    """Patterns of weights that are not read -> what they are; `{num_layers}` is their number."""

    def prefix(self, names: Container[str], first: str) -> str:
        """Return the prefix in a file.

        Args:
            names: of the tensors in it.
            first: one that every model has, without prefix.
        """
        known = [prefix for prefix in self.prefixes if full_name(first, prefix) in names]
        return known[0] if known else self.prefixes[0]

    def config(self, fields: Mapping[str, object], source: str) -> ConfigFields:
        """Return the fields of a `config.json` of this family, to be given to `settings`."""
        return ConfigFields(fields, source, self.absent)

    def read(self, fields: Mapping[str, object], source: str) -> ModelDescription:
        """Return what a `config.json` of this family describes.

        Raises:
            ConfigError: it cannot be built here, with all reasons.
        """
        config = self.config(fields, source)
        try:
            settings = self.settings(config)
        except (TypeError, ValueError, LookupError, AttributeError, ArithmeticError) as error:
            config.finish()
            raise ConfigError(
                f"{source} has a field of another kind than its name says: {error}.",
                rule="fields are what Transformers writes: numbers, lists or objects",
                flags=["--load-hf"],
                fix="download or save the model again",
            ) from error
        config.finish()
        return settings


SLIDING, FULL = "sliding_attention", "full_attention"


def with_window(
    model: ModelDescription, config: ConfigFields, usual: Sequence[bool]
) -> ModelDescription:
    """Return `model` with the window of the config.

    Args:
        usual: which layers have it where the config does not list them.
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


def window_fields(settings: ModelDescription) -> dict[str, Any]:
    """Return the fields of the window."""
    window = settings.window_size
    kinds = [SLIDING if windowed and window else FULL for windowed in settings.windowed_layers]
    return {
        "sliding_window": None if window is None else window[0] + 1,
        "layer_types": kinds,
    }
