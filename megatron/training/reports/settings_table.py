"""Settings of runs as text: which are not the defaults, and in which two runs differ."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from megatron.training.config.run import all_flags, plain

UNKNOWN = "—"
"""Stands for a value that a run does not have."""


@dataclass(frozen=True)
class SettingRow:
    """A setting and its values."""

    flag: str
    value: str
    other: str
    """The default, or the value in another run."""


def changed_from_default(settings: Mapping[str, str]) -> list[SettingRow]:
    """Return the settings that are not those of a command line without flags: set or derived."""
    return [row for row in _against_defaults(settings) if row.value != row.other]


def differences(settings: Mapping[str, str], other: Mapping[str, str]) -> list[SettingRow]:
    """Return the settings that two runs have with other values."""
    names = [name for name in settings if name in other]
    names += [name for name in (*settings, *other) if (name in settings) != (name in other)]
    return [
        SettingRow(flag_of(name), settings.get(name, UNKNOWN), other.get(name, UNKNOWN))
        for name in names
        if settings.get(name) != other.get(name)
    ]


def flag_of(name: str) -> str:
    """Return the flag of a setting, or its name if there is none."""
    spec = all_flags().get(name)
    return name if spec is None else spec.flag


def _against_defaults(settings: Mapping[str, str]) -> list[SettingRow]:
    table = all_flags()
    return [
        SettingRow(
            flag_of(name), value, str(plain(table[name].default)) if name in table else UNKNOWN
        )
        for name, value in settings.items()
    ]
