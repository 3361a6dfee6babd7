"""Read settings from a YAML file: names of flags, flat or in sections of any name."""

from __future__ import annotations

import enum
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from megatron.core.foundation import optional_imports
from megatron.core.foundation.errors import ConfigError, MegatronError, shown
from megatron.core.settings.flags import FlagSpec, kebab
from megatron.training.cli.suggest import suggestion
from megatron.training.config.run import all_flags, flags_by_spelling, opposites_by_spelling


def read_yaml(path: str, problems: list[MegatronError]) -> dict[str, Any]:
    """Return field name -> value; an error for each invalid key or value is added to `problems`.

    Keys are field names or flags without their leading dashes, with `-` or `_`. A mapping is a
    section, whose name is ignored.
    """
    yaml = optional_imports.require("yaml", purpose="--yaml-cfg")
    try:
        document = yaml.safe_load(Path(path).read_text())
        _check_size(document)
    except (OSError, ValueError, RecursionError, yaml.YAMLError) as error:
        problems.append(
            ConfigError(
                f"the settings file {path!r} cannot be read: {error}",
                rule="--yaml-cfg names a YAML file",
                flags=["--yaml-cfg"],
                fix="check the path and the syntax",
            )
        )
        return {}
    if document is None:
        return {}
    if not isinstance(document, Mapping):
        problems.append(
            ConfigError(
                f"the settings file {path!r} contains a {type(document).__name__}.",
                rule="it contains a mapping from flag names to values",
                flags=["--yaml-cfg"],
                fix="write lines such as 'num_layers: 12'",
            )
        )
        return {}
    values: dict[str, Any] = {}
    _collect(document, path, values, problems)
    return values


def _check_size(document: Any) -> None:
    """Refuse documents of too many values or levels; each alias (`*name`) counts its values."""
    todo, num_values = [(document, 0)], 0
    while todo:
        value, depth = todo.pop()
        num_values += 1
        if num_values > _MAX_VALUES or depth > _MAX_LEVELS:
            raise ValueError(f"more than {_MAX_VALUES} values, or {_MAX_LEVELS} levels")
        if isinstance(value, Mapping):
            todo += [(inner, depth + 1) for inner in value.values()]
        elif isinstance(value, list):
            todo += [(inner, depth + 1) for inner in value]


_MAX_VALUES = 100_000
_MAX_LEVELS = 20


def _collect(
    section: Mapping[Any, Any], path: str, values: dict[str, Any], problems: list[MegatronError]
) -> None:
    for key, value in section.items():
        if isinstance(value, Mapping):
            _collect(value, path, values, problems)
            continue
        name = str(key).replace("-", "_")
        spec = all_flags().get(name) or flags_by_spelling().get(kebab(name))
        says_default = spec is None
        spec = spec or opposites_by_spelling().get(kebab(name))
        if spec is None:
            near = suggestion(kebab(name)).lstrip("-").replace("-", "_")
            problems.append(
                ConfigError(
                    f"unknown setting {shown(key)} in {path}.",
                    rule="settings have the names of the flags",
                    flags=["--yaml-cfg"],
                    fix=f"did you mean {near}?" if near else "see docs/flags.md",
                )
            )
        elif spec.name in values:
            problems.append(
                ConfigError(
                    f"{spec.flag} is set twice in {path}.",
                    rule="a setting is given once",
                    flags=["--yaml-cfg", spec.flag],
                    fix="remove one of the two lines",
                )
            )
        else:
            # "no_swiglu: true" and "no_bias_linear: true" set their field to False.
            negates = spec.is_switch and name != spec.name and spec.default is not says_default
            try:
                values[spec.name] = _typed(spec, value, negate=negates)
            except ValueError as reason:
                problems.append(
                    ConfigError(
                        f"{key}: {shown(value)} in {path} {reason}.",
                        rule=f"{spec.flag} takes {spec.type_text()}",
                        flags=["--yaml-cfg", spec.flag],
                        fix="correct the value",
                    )
                )


def _typed(spec: FlagSpec, value: Any, *, negate: bool) -> Any:
    """Check and convert one YAML value like a value of the command line."""
    if value is None:
        return spec.default
    if spec.is_switch:
        if not isinstance(value, bool):
            raise ValueError("is not true or false")
        return (not value) if negate else value
    if spec.metadata.nargs is not None:
        items = value if isinstance(value, list) else [value]
        if isinstance(spec.metadata.nargs, int) and len(items) != spec.metadata.nargs:
            raise ValueError(f"is not a list of {spec.metadata.nargs} values")
        converted = [_one(spec, item) for item in items]
        is_single = not isinstance(value, list) and not isinstance(spec.default, (list, type(None)))
        return converted[0] if is_single else converted
    return _one(spec, value)


def _one(spec: FlagSpec, value: Any) -> Any:
    if isinstance(value, (bool, dict, enum.Enum)):
        raise ValueError(f"is not {spec.type_text()}")
    if isinstance(value, list):
        return spec.convert(
            str(value).strip("[]") if spec.metadata.type_text == "int,int" else str(value)
        )
    return spec.convert(str(value))
