"""What a family of models has to say about itself."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from megatron.hugging_face.config_fields import ConfigFields
from megatron.hugging_face.model_description import ModelDescription
from megatron.hugging_face.weight_map import WeightRule


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
    prefixes: tuple[str, ...] = ("",)
    """What may be before all names in the files, written first to last."""
    without_meaning: tuple[str, ...] = ()
    """Patterns of tensors that older files hold besides weights."""
    other_names: Mapping[str, str] = field(default_factory=dict)
    """Patterns of names in other files -> what is written instead."""
    left_out: Mapping[str, str] = field(default_factory=dict)
    """Patterns of weights that are not read -> what they are; `{num_layers}` is their number."""
