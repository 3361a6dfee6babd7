"""The description of a job from a YAML file and flags; a flag is stronger than the file."""

from __future__ import annotations

import difflib
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from megatron.core.foundation import optional_imports
from megatron.core.foundation.errors import ConfigError, MegatronError, raise_together, shown
from megatron.core.settings.flags import FlagSpec, flag_specs
from megatron.launcher.job import (
    HostSettings,
    Job,
    KubernetesSettings,
    SkyPilotSettings,
    SlurmSettings,
)

_MAX_BYTES = 1 << 20


_GROUPS = (Job, SlurmSettings, KubernetesSettings, HostSettings, SkyPilotSettings)


def read_description(path: str) -> dict[str, Any]:
    """Return the values of a YAML file by the names of the flags.

    Raises:
        ConfigError: it cannot be read, or says what is no setting of a job.
    """
    yaml = optional_imports.require("yaml", purpose="a description of a job")
    try:
        with Path(path).open("rb") as file:
            text = file.read(_MAX_BYTES + 1)
        if len(text) > _MAX_BYTES or b"*" in text and b"&" in text:
            raise ValueError("it is longer than 1 MiB, or has aliases")
        document = yaml.safe_load(text)
    except (OSError, ValueError, RecursionError, yaml.YAMLError) as error:
        raise ConfigError(
            f"{path} cannot be read: {error}",
            rule="the description of a job is a YAML file",
            flags=["JOB.yaml"],
            fix="check the path and the syntax",
        ) from None
    if not isinstance(document, Mapping):
        raise ConfigError(
            f"{path} holds no settings.",
            rule="the description of a job is a mapping",
            flags=["JOB.yaml"],
            fix="write lines such as `nodes: 2`",
        )
    specs = {spec.name: spec for group in _GROUPS for spec in flag_specs(group, "")}
    values: dict[str, Any] = {}
    problems: list[MegatronError] = []
    for key, value in _settings(document, specs):
        try:
            values[key] = _value(specs[key], value)
        except KeyError:
            problems.append(_unknown(path, key, list(specs)))
        except ValueError as reason:
            problems.append(
                ConfigError(
                    f"{key}: {shown(value)} {reason}.",
                    rule=f"it takes {specs[key].type_text()}",
                    flags=[specs[key].flag],
                    fix="correct the value",
                )
            )
    raise_together(problems, summary=path)
    return values


def _settings(
    section: Mapping[Any, Any], specs: Mapping[str, FlagSpec]
) -> Iterator[tuple[str, object]]:
    """Yield names and values; the name of a section only helps the reader."""
    for key, value in section.items():
        name = str(key).replace("-", "_")
        if isinstance(value, Mapping) and name not in specs:
            yield from _settings(value, specs)
        else:
            yield name, value


def _value(spec: FlagSpec, value: object) -> object:
    """Convert one value as the command line would; a mapping is NAME=VALUE texts."""
    if spec.is_switch:
        if not isinstance(value, bool):
            raise ValueError("is not true or false")
        return value
    if not spec.metadata.is_repeated and spec.name != "command":
        if isinstance(value, bool | list | Mapping) or value is None:
            raise ValueError("is not one value")
        return spec.convert(str(value))
    if isinstance(value, Mapping):
        return [f"{key}={_text(inner)}" for key, inner in value.items()]
    return [_text(one) for one in (value if isinstance(value, list) else [value])]


def _text(value: object) -> str:
    """Return a value as a word; true and false as shells have them."""
    if isinstance(value, bool):
        return "1" if value else "0"
    if isinstance(value, list | Mapping) or value is None:
        raise ValueError("is not a list of words")
    return str(value)


def _unknown(path: str, key: str, known: Sequence[str]) -> ConfigError:
    near = difflib.get_close_matches(key, known, n=1)
    return ConfigError(
        f"unknown setting {shown(key)} in {path}.",
        rule="settings have the names of the flags of `lattice launch`",
        flags=["JOB.yaml"],
        fix=f"did you mean {near[0]}?" if near else "see `lattice launch --help`",
    )
