"""Check that every field of a config has a value of the annotated type."""

from __future__ import annotations

import collections.abc
import dataclasses
import enum
import functools
import numbers
import types
import typing
from collections.abc import Mapping, Sequence
from typing import Any

from megatron.core.foundation.errors import ConfigError, MegatronError, raise_together, shown
from megatron.core.settings.inert_flags import inert_fields

_OURS = ("megatron.core.", "megatron.inference.")
_NUMBERS: dict[Any, Any] = {int: numbers.Integral, float: numbers.Real}
_UNIONS = (typing.Union, types.UnionType)


def check_types(config: object) -> None:
    """Compare every field of a new config dataclass with its annotation.

    The name of an enum member is converted to the member, None to the default of an enum or a
    switch, a sequence to the annotated `list` or `tuple`, and a numpy number to a Python number.
    Fields with their default value, and fields declared by other packages, are not checked.

    Raises:
        ConfigError: one or more values have a wrong type; one error lists all of them.
    """
    problems: list[MegatronError] = []
    kind: Any = type(config)
    for name, hint, default in _typed_fields(kind):
        value = getattr(config, name)
        if value is default:
            continue
        try:
            is_unset = value is None and (hint is bool or _is_enum(hint))
            converted = default if is_unset else _converted(value, hint)
        except TypeError:
            has_default = default is not dataclasses.MISSING
            shown_default = f" to use {getattr(default, 'name', default)!r}" if has_default else ""
            problems.append(
                ConfigError(
                    f"{name}={shown(value)} is of type {type(value).__name__}.",
                    rule=f"{name} is {_described(hint)}",
                    fix=f"convert the value, or leave {name} out{shown_default}",
                )
            )
            continue
        if converted is not value:
            object.__setattr__(config, name, converted)  # a frozen dataclass has no other way
    raise_together(problems, summary=type(config).__name__)


@functools.cache
def _typed_fields(config_class: Any) -> tuple[tuple[str, Any, Any], ...]:
    """Return (name, annotation, default) of the fields to check."""
    hints: dict[str, Any] = {}
    for base in reversed(config_class.__mro__):
        if base.__module__.startswith(_OURS) and dataclasses.is_dataclass(base):
            hints |= typing.get_type_hints(base)
    # An inert flag takes text where Megatron's field may have a type that does not exist here.
    unread = {row.name for row in inert_fields(config_class)}
    return tuple(
        (field.name, hints[field.name], field.default)
        for field in dataclasses.fields(config_class)
        if field.init and field.name in hints
        if not (field.name in unread and _takes_text(hints[field.name]))
    )


def _takes_text(hint: Any) -> bool:
    return hint is str or any(map(_takes_text, typing.get_args(hint)))


def _is_enum(hint: Any) -> bool:
    return isinstance(hint, type) and issubclass(hint, enum.Enum)


def _converted(value: Any, hint: Any) -> Any:
    """Return `value` converted to the annotated type, or raise TypeError."""
    origin, inner = typing.get_origin(hint), typing.get_args(hint)
    if origin in _UNIONS:
        for option in inner:
            try:
                return _converted(value, option)
            except TypeError:
                continue
    elif hint is Any or origin is collections.abc.Callable and callable(value):
        return value
    elif hint in (list, tuple) or origin in (list, tuple, collections.abc.Sequence):
        if isinstance(value, Sequence) and not isinstance(value, (str, bytes)):
            return _converted_items(value, origin or hint, inner)
    elif origin is collections.abc.Mapping:
        if isinstance(value, Mapping):
            pairs = value.items()
            return {_converted(k, inner[0]): _converted(v, inner[1]) for k, v in pairs}
    elif hint in _NUMBERS:
        if isinstance(value, _NUMBERS[hint]) and not isinstance(value, bool):
            return value if isinstance(value, (int, float)) else hint(value)
    elif _is_enum(hint) and isinstance(value, str) and value in hint.__members__:
        return hint[value]
    elif isinstance(hint, type) and isinstance(value, hint):
        return value
    raise TypeError


def _converted_items(value: Sequence[Any], kind: Any, inner: tuple[Any, ...]) -> Any:
    is_fixed = kind is tuple and bool(inner) and inner[-1] is not Ellipsis
    if is_fixed and len(value) != len(inner):
        raise TypeError
    hints = inner if is_fixed else (inner or (Any,))[:1] * len(value)
    items = [_converted(item, hint) for item, hint in zip(value, hints, strict=True)]
    is_kept = isinstance(value, kind) and all(map(lambda a, b: a is b, items, value))
    return value if is_kept else tuple(items) if kind is tuple else items


def _described(hint: Any) -> str:
    """Describe in words which values an annotation accepts."""
    if typing.get_origin(hint) in _UNIONS:
        return " or ".join(map(_described, typing.get_args(hint)))
    if _is_enum(hint):
        return f"{hint.__name__} or one of its names: {', '.join(hint.__members__)}"
    if typing.get_origin(hint) is collections.abc.Callable:
        return "a function"
    if typing.get_args(hint):
        return str(hint).removeprefix("collections.abc.")
    return "None" if hint is type(None) else str(hint.__name__)
