"""Configs as mappings and YAML files, see `megatron.training.config.instantiate_utils`."""

from __future__ import annotations

import copy
import functools
import inspect
from collections.abc import Iterator
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


def _as_target(data: Any) -> dict[str, Any]:
    """Return a mapping for `instantiate` of a value other than a number, a text or a list.

    An object of an unknown class is its class, called without arguments.
    """
    if isinstance(data, torch.dtype):
        return {"_target_": str(data), "_call_": False}
    if isinstance(data, functools.partial):
        made = {"_target_": _name_of(data.func), "_partial_": True, "_args_": list(data.args)}
        return made | data.keywords
    if isinstance(data, Enum):
        return {"_target_": _name_of(type(data)), "_call_": True, "_args_": [data.value]}
    if type(data).__module__.startswith("transformers.") and hasattr(data, "to_dict"):
        target = f"{_name_of(type(data))}.from_dict"
        return {"_target_": target, "_call_": True, "config_dict": data.to_dict()}
    try:
        return {"_target_": _name_of(data), "_call_": False}
    except AttributeError:
        return {"_target_": _name_of(type(data)), "_call_": True}


def _represent(dumper: Any, data: Any) -> Any:
    return dumper.represent_data(_as_target(data))


@contextmanager
def safe_yaml_representers() -> Iterator[None]:
    """Let `yaml.safe_dump` write functions, dtypes, enums, partials and configs of Transformers."""
    dumper = require("yaml", purpose=_FILES).SafeDumper
    before = dumper.yaml_multi_representers
    dumper.yaml_multi_representers = {**before, object: _represent}
    try:
        yield
    finally:
        dumper.yaml_multi_representers = before


@functools.cache
def _get_init_false_fields(target_class: Any) -> frozenset[str]:
    known = fields(target_class) if is_dataclass(target_class) else ()
    return frozenset(field.name for field in known if not field.init)


def _resolve_target_class(target: Any) -> Any:
    """Return the class with this dotted name, or None."""
    try:
        return instantiate_utils._resolve_target(target, "")
    except instantiate_utils.InstantiationException:
        return None


def sanitize_dataclass_config(config: object) -> Any:
    """Return the config without computed fields, which older files contain (`init=False`)."""
    if isinstance(config, list):
        return [sanitize_dataclass_config(item) for item in config]
    if not isinstance(config, dict):
        return config
    computed = _get_init_false_fields(_resolve_target_class(config.get("_target_")))
    return {k: sanitize_dataclass_config(v) for k, v in config.items() if k not in computed}


@dataclass(kw_only=True)
class ConfigContainerBase:
    """A dataclass of configs that can be written to a mapping or a YAML file and read again."""

    __version__: str = "0.1.0"

    @classmethod
    def from_dict(
        cls, config_dict: dict[str, object], mode: InstantiationMode = InstantiationMode.STRICT
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
                f"{sorted(config)}, and {unknown} are no fields"
            )
        kept = {key: value for key, value in config.items() if key in known}
        instance: Self = instantiate_utils.instantiate(kept, mode=mode)
        return instance

    @classmethod
    def from_yaml(cls, yaml_path: str, mode: InstantiationMode = InstantiationMode.LENIENT) -> Self:
        """Build a container from a YAML file; interpolations of OmegaConf are resolved."""
        text = Path(yaml_path).read_text()
        loaded = require("yaml", purpose=_FILES).safe_load(text)
        if "${" in text:
            omegaconf = require("omegaconf", purpose="an interpolation").OmegaConf
            loaded = omegaconf.to_container(omegaconf.create(loaded), resolve=True)
        return cls.from_dict(loaded, mode)

    def to_dict(self) -> dict[str, Any]:
        """Return the public fields and `_target_`; nested dataclasses are mappings, too."""
        return self._fields_of(self)

    @classmethod
    def _fields_of(cls, value: Any) -> dict[str, Any]:
        public = (f.name for f in fields(value) if not f.name.startswith("_"))
        values = {name: cls._convert_value_to_dict(getattr(value, name)) for name in public}
        return {"_target_": f"{type(value).__module__}.{type(value).__qualname__}", **values}

    @classmethod
    def _convert_value_to_dict(cls, value: Any) -> Any:
        if hasattr(value, "to_cfg_dict"):
            return value.to_cfg_dict()
        if isinstance(value, ConfigContainerBase):
            return value.to_dict()
        if is_dataclass(value) and not isinstance(value, type):
            return cls._fields_of(value)
        if isinstance(value, list | tuple):
            return [cls._convert_value_to_dict(item) for item in value]
        if isinstance(value, dict):
            return {key: cls._convert_value_to_dict(item) for key, item in value.items()}
        return value

    def to_yaml(self, yaml_path: str | None = None) -> None:
        """Write the container to a YAML file, or print it."""
        with safe_yaml_representers():
            dump = require("yaml", purpose=_FILES).safe_dump
            text = dump(self.to_dict(), default_flow_style=False)
        if yaml_path is None:
            print(text)
        else:
            Path(yaml_path).write_text(text)

    print_yaml = to_yaml
