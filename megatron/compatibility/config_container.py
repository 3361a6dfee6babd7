"""Configs as mappings and YAML files, see `megatron.training.config.instantiate_utils`."""

from __future__ import annotations

import copy
import functools
import inspect
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, fields, is_dataclass
from enum import Enum
from pathlib import Path
from typing import Any, Self

import torch

from megatron.core.foundation.optional_imports import require
from megatron.training.config import instantiate_utils
from megatron.training.config.instantiate_utils import InstantiationMode

_FILES = "a config as a YAML file"


def _name_of(value: Any) -> str:
    """Return the dotted name of a class or a function."""
    module = inspect.getmodule(value)
    if module is None:
        raise AttributeError(f"{value!r} belongs to no module")
    return f"{module.__name__}.{value.__qualname__}"


def _function_representer(dumper: Any, data: Any) -> Any:
    return dumper.represent_data({"_target_": _name_of(data), "_call_": False})


def _torch_dtype_representer(dumper: Any, data: torch.dtype) -> Any:
    return dumper.represent_data({"_target_": str(data), "_call_": False})


def _partial_representer(dumper: Any, data: functools.partial[Any]) -> Any:
    named = {"_target_": _name_of(data.func), "_partial_": True, "_args_": list(data.args)}
    return dumper.represent_data(named | data.keywords)


def _enum_representer(dumper: Any, data: Enum) -> Any:
    made = {"_target_": _name_of(type(data)), "_call_": True, "_args_": [data.value]}
    return dumper.represent_data(made)


def _pretrained_config_representer(dumper: Any, data: Any) -> Any:
    """Write a config of Transformers as the call of its class's `from_dict`."""
    target = f"{_name_of(type(data))}.from_dict"
    written = {"_target_": target, "_call_": True, "config_dict": data.to_dict()}
    return dumper.represent_data(written)


def _safe_object_representer(dumper: Any, data: Any) -> Any:
    """Write any other value by name: a function or class as itself, an object as its class."""
    try:
        written = {"_target_": _name_of(data), "_call_": False}
    except AttributeError:
        written = {"_target_": _name_of(type(data)), "_call_": True}
    return dumper.represent_data(written)


@contextmanager
def safe_yaml_representers() -> Iterator[None]:
    """Let `yaml.safe_dump` write functions, dtypes, enums, partials and configs of Transformers."""
    dumper = require("yaml", purpose=_FILES).SafeDumper
    before = dumper.yaml_representers, dumper.yaml_multi_representers
    dumper.yaml_representers = before[0] | {
        functools.partial: _partial_representer,
        type(_name_of): _function_representer,
        type: _function_representer,
        torch.dtype: _torch_dtype_representer,
    }
    # The first match counts, and every value is an object: the general function comes last.
    general: dict[Any, Callable[[Any, Any], Any]] = {Enum: _enum_representer}
    transformers = sys.modules.get("transformers")
    if transformers is not None:  # otherwise no config of it is among the values
        classes = transformers.GenerationConfig, transformers.PretrainedConfig
        general |= dict.fromkeys(classes, _pretrained_config_representer)
    general[object] = _safe_object_representer
    dumper.yaml_multi_representers = before[1] | general
    try:
        yield
    finally:
        dumper.yaml_representers, dumper.yaml_multi_representers = before


@functools.cache
def _get_init_false_fields(target_class: type) -> frozenset[str]:
    if not is_dataclass(target_class):
        return frozenset()
    return frozenset(field.name for field in fields(target_class) if not field.init)


def _resolve_target_class(target: str) -> Any:
    """Return the class with this dotted name, or None."""
    try:
        return instantiate_utils._resolve_target(target, "", check_callable=False)
    except instantiate_utils.InstantiationException:
        return None


def sanitize_dataclass_config(config: Any) -> Any:
    """Return the config without computed fields, which older files contain (`init=False`)."""
    if isinstance(config, list):
        return [sanitize_dataclass_config(item) for item in config]
    if not isinstance(config, dict):
        return config
    target = config.get("_target_")
    found = _resolve_target_class(target) if isinstance(target, str) else None
    computed = _get_init_false_fields(found) if isinstance(found, type) else frozenset()
    return {k: sanitize_dataclass_config(v) for k, v in config.items() if k not in computed}


@dataclass(kw_only=True)
class ConfigContainerBase:
    """A dataclass of configs that can be written to a mapping or a YAML file and read again."""

    __version__: str = "0.1.0"

    @classmethod
    def from_dict(
        cls, config_dict: dict[str, Any], mode: InstantiationMode = InstantiationMode.STRICT
    ) -> Self:
        """Build a container from the result of `to_dict`.

        Raises:
            ValueError: in strict mode, `config_dict` has keys that are no fields. In lenient mode
                they are dropped.
        """
        config = sanitize_dataclass_config(copy.deepcopy(config_dict))
        known = {"_target_", *(f.name for f in fields(cls) if not f.name.startswith("_"))}
        unknown = sorted(set(config) - known)
        if "_target_" not in config or (unknown and mode is InstantiationMode.STRICT):
            raise ValueError(
                f"a mapping for {cls.__qualname__} has _target_ and its fields; this one has "
                f"{sorted(config)}, of which {unknown} are no fields"
            )
        kept = {key: value for key, value in config.items() if key in known}
        instance: Self = instantiate_utils.instantiate(kept, mode=mode)
        return instance

    @classmethod
    def from_yaml(
        cls, yaml_path: str, mode: InstantiationMode = InstantiationMode.LENIENT
    ) -> Self:
        """Build a container from a YAML file; interpolations of OmegaConf are resolved.

        Raises:
            FileNotFoundError: there is no such file.
        """
        loaded = require("yaml", purpose=_FILES).safe_load(Path(yaml_path).read_text())
        omegaconf = require("omegaconf", purpose=_FILES).OmegaConf
        return cls.from_dict(omegaconf.to_container(omegaconf.create(loaded), resolve=True), mode)

    def to_dict(self) -> dict[str, Any]:
        """Return the public fields and `_target_`; nested dataclasses are mappings, too."""
        public = (f.name for f in fields(self) if not f.name.startswith("_"))
        values = {name: self._convert_value_to_dict(getattr(self, name)) for name in public}
        return {"_target_": _qualified(type(self)), **values}

    @classmethod
    def _convert_value_to_dict(cls, value: Any) -> Any:
        if isinstance(value, ConfigContainerBase):
            return value.to_dict()
        if hasattr(value, "to_cfg_dict"):
            return value.to_cfg_dict()
        if is_dataclass(value) and not isinstance(value, type):
            public = (f.name for f in fields(value) if not f.name.startswith("_"))
            values = {name: cls._convert_value_to_dict(getattr(value, name)) for name in public}
            return {"_target_": _qualified(type(value)), **values}
        if isinstance(value, list | tuple):
            return [cls._convert_value_to_dict(item) for item in value]
        if isinstance(value, dict):
            return {key: cls._convert_value_to_dict(item) for key, item in value.items()}
        return value

    def to_yaml(self, yaml_path: str | None = None) -> None:
        """Write the container to a YAML file, or print it."""
        with safe_yaml_representers():
            text = require("yaml", purpose=_FILES).safe_dump(self.to_dict(), default_flow_style=False)
        if yaml_path is None:
            print(text)
        else:
            Path(yaml_path).write_text(text)

    def print_yaml(self) -> None:
        """Print the container as YAML."""
        self.to_yaml()


def _qualified(of_class: type) -> str:
    return f"{of_class.__module__}.{of_class.__qualname__}"
