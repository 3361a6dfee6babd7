"""Declarative descriptions of modules and their parts.

A `ModuleSpec` names a class, extra keyword arguments and the specs of its parts. Users change a
model by changing its spec; `build_module` builds a module from a spec.
"""

from __future__ import annotations

import importlib
import types
from dataclasses import dataclass, field, fields, is_dataclass
from typing import Any

from megatron.core.foundation.errors import ConfigError


@dataclass
class ModuleSpec:
    """One module of a model, not built yet.

    Attributes:
        module: a class or function, or (module path, name) of one.
        params: keyword arguments for the constructor, in addition to the parent's arguments.
        submodules: a dataclass of the parts' specs, passed on as `submodules`; None for a leaf.
        metainfo: notes of the author; building ignores them.
    """

    module: tuple[str, str] | type | Any
    params: dict[str, Any] = field(default_factory=dict)
    submodules: Any = None
    metainfo: dict[str, Any] = field(default_factory=dict)


def import_module(module_path: tuple[str, str]) -> Any:
    """Return the object at (module path, name), for example ("torch.nn", "Linear").

    Raises:
        ConfigError: there is no such module or name.
    """
    path, name = module_path
    try:
        return getattr(importlib.import_module(path), name)
    except (ImportError, AttributeError) as error:
        raise ConfigError(
            f"cannot import {name!r} from {path!r}: {error}.",
            rule="a spec names a class or function as (module path, name)",
            flags=["--spec"],
            fix="check the spelling and that the module is on PYTHONPATH",
        ) from error


def get_module(spec_or_module: ModuleSpec | tuple[str, str] | object) -> Any:
    """Return the class or function of a spec, without building it."""
    module = spec_or_module.module if isinstance(spec_or_module, ModuleSpec) else spec_or_module
    return import_module(module) if isinstance(module, tuple) else module


def get_submodules(spec: object) -> Any:
    """Return the parts of a spec, or the argument itself if it is a dataclass of parts."""
    if isinstance(spec, ModuleSpec):
        return spec.submodules
    return spec


def build_module(
    spec_or_module: ModuleSpec | tuple[str, str] | object, *args: object, **kwargs: object
) -> Any:
    """Build the module of a spec, a class or (module path, name).

    A plain function is returned unchanged: such parts (bias + dropout + add) are called, not
    constructed. A spec's `params` override `kwargs`.

    Raises:
        ConfigError: the constructor does not accept the arguments; names class and spec.
    """
    module = get_module(spec_or_module)
    if isinstance(module, types.FunctionType):
        return module
    if isinstance(spec_or_module, ModuleSpec):
        if spec_or_module.submodules is not None:
            kwargs["submodules"] = spec_or_module.submodules
        kwargs.update(spec_or_module.params)
    try:
        return module(*args, **kwargs)
    except TypeError as error:
        trace = error.__traceback__
        if trace is not None and trace.tb_next is not None:  # raised inside the constructor
            raise
        raise TypeError(f"{error} (when building {describe_spec(spec_or_module)})") from error


def describe_spec(spec: object, indent: str = "") -> str:
    """Return a spec as an indented outline: class names and parts."""
    module = get_module(spec)
    name = getattr(module, "__name__", repr(module))
    lines = [name]
    parts = get_submodules(spec) if isinstance(spec, ModuleSpec) else None
    if is_dataclass(parts):
        for part in fields(parts):
            value = getattr(parts, part.name)
            if isinstance(value, (ModuleSpec, type)):
                outline = describe_spec(value, indent + "  ")
                lines.append(f"{indent}  {part.name}: {outline}")
    return "\n".join(lines)
