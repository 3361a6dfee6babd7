"""Flags of Megatron-LM that have no effect here: accepted with a note, or refused.

Each is a line of `inert_flags.tsv`, with these columns:

    flag     spellings; empty if Megatron has only a field of a config
    type     as in docs/flags.md: `on`, `off-switch`, `int`, `str: a/b`, `str x+`
    default  empty for None, `[]` for an empty list, `""` for an empty text
    effect   `no effect`, `refused` (any value but the default) or `tunes`
    instead  no effect: the reason; refused: what to use instead; tunes: the field that it tunes
    field    name of the config's field if it does not follow from the flag; `field:name` if the
             name on `get_args()` differs
    configs  Megatron's configs with the field: parallel, transformer, optimizer, ddp
"""

from __future__ import annotations

import functools
import sys
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from megatron.core.foundation.errors import ConfigError, MegatronError
from megatron.core.settings.flags import FlagMetadata, declared_field

ClassT = TypeVar("ClassT", bound=type)

INERT_FLAGS = Path(__file__).with_name("inert_flags.tsv")
_ELEMENTS: dict[str, Any] = {"int": int, "float": float, "str": str}
_WRITTEN: dict[str, Any] = {"": None, "[]": [], '""': ""}
_EFFECTS = {"no effect": "note", "refused": "refuse"}
_FIELDS = "__inert_fields__"


@dataclass(frozen=True)
class InertFlag:
    """One line of the file, as the field of a dataclass."""

    name: str
    annotation: Any
    default: Any
    metadata: FlagMetadata
    configs: tuple[str, ...]


@functools.cache
def inert_flags() -> tuple[InertFlag, ...]:
    """Read the file."""
    header, *lines = INERT_FLAGS.read_text().splitlines()
    columns = header.split("\t")
    return tuple(_read_line(**dict(zip(columns, line.split("\t"), strict=True))) for line in lines)


def _read_line(
    flag: str, type: str, default: str, effect: str, instead: str, field: str, configs: str
) -> InertFlag:
    spellings = tuple(flag.split())
    kind, _, choice_text = type.partition(": ")
    name, _, arg = field.partition(":")
    if not name:
        name = spellings[0].removeprefix("--").replace("-", "_")
        if kind == "off-switch":  # the field has the name of the mechanism
            name = name.removeprefix("no_").removeprefix("disable_")
    told: dict[str, Any] = {"part_of": (instead,), "help": f"Tunes {instead.replace('_', '-')}."}
    if effect != "tunes":
        told = {_EFFECTS[effect]: instead, "help": f"{effect.capitalize()}: {instead}."}
    annotation: Any = bool
    value: Any = kind == "off-switch"
    if kind not in ("on", "off-switch"):
        element_name, _, nargs = kind.partition(" x")
        element = _ELEMENTS[element_name]
        told["choices"] = tuple(map(element, choice_text.split("/"))) if choice_text else ()
        told["nargs"] = nargs or None
        annotation = (list[element] if nargs in ("+", "*") else element) | None  # type: ignore[valid-type]
        value = _WRITTEN[default] if default in _WRITTEN else element(default)
    metadata = FlagMetadata(
        name=arg or name, is_flag=bool(spellings), is_arg=bool(spellings), spellings=spellings,
        **told,
    )  # fmt: skip
    return InertFlag(name, annotation, value, metadata, tuple(configs.split()))


def with_inert_fields(config: str = "") -> Callable[[ClassT], ClassT]:
    """Return a class decorator that adds the file's fields; apply it before `@dataclass`.

    Args:
        config: an entry of the column `configs`; "" adds all fields that have a flag.
    """

    def add(cls: ClassT) -> ClassT:
        chosen = [
            row
            for row in inert_flags()
            if (config in row.configs if config else row.metadata.is_flag)
        ]
        for row in chosen:
            cls.__annotations__[row.name] = row.annotation
            setattr(cls, row.name, declared_field(row.default, row.metadata))
        setattr(cls, _FIELDS, chosen)
        return cls

    return add


def inert_fields(config_class: type) -> Iterator[InertFlag]:
    """Yield the fields that `with_inert_fields` added to a class or its bases."""
    for base in config_class.__mro__:
        yield from vars(base).get(_FIELDS, ())


def _given(config: object) -> Iterator[tuple[str, FlagMetadata]]:
    """Yield "Class.field=value" and metadata of each inert field that is set and not None."""
    for row in inert_fields(type(config)):
        value: Any = getattr(config, row.name)
        if value is not None and value != row.default:
            yield f"{type(config).__name__}.{row.name}={value!r}", row.metadata


def refused_settings(config: object) -> list[MegatronError]:
    """Return one problem for each refused field that is set."""
    return [
        ConfigError(
            f"{given} is not supported yet.",
            rule="a setting that would change the model or the data acts or is refused",
            flags=list(metadata.spellings),
            fix=metadata.refuse,
        )
        for given, metadata in _given(config)
        if metadata.refuse
    ]


def warn_of_unused_settings(config: object) -> None:
    """Warn of each field that is set and has no effect, at the line that built the config."""
    level, frame = 0, sys._getframe()
    while frame.f_back is not None and (
        level == 0 or frame.f_code.co_name in ("__post_init__", "__init__")
    ):
        level, frame = level + 1, frame.f_back
    for given, metadata in _given(config):
        if metadata.note:
            warnings.warn(f"{given}: {metadata.note}.", stacklevel=level + 1)
