"""Settings as rows of text: of parts that are not here, which nothing reads.

A heading says what becomes of the settings below it, in the words of docs/flags.md:

    no effect: REASON        accepted; the run says the reason in a line
    refused: INSTEAD         any value but the default stops the run
    of NAME                  tunes the mechanism of that flag, and has no effect without it

A row has the spellings of one flag, its type and, after "=", its default. A name before them is
that of the field, where the flag says another or there is none; after a colon follows its name on
`get_args()`, where that is different:

    --exchange-algorithm str: broadcast/gather = broadcast
    --pin-buffers        on
    --no-pin-buffers     off-switch
    --names              str x+
    uses_slots --slots   on
    num_slots            int = 4
    pins:pin_all --pin-all on
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Any

from megatron.core.settings.flags import FlagMetadata, default_of, flag, metadata_of

_ELEMENTS: dict[str, Any] = {"int": int, "float": float, "str": str}
_EMPTY: dict[str, Any] = {"[]": [], '""': ""}
_FORMS = {"no effect": "note", "refused": "refuse"}


class FlagTable:
    """Base of a dataclass whose fields are the rows that it is declared with.

    What is derived from it without rows inherits the fields.
    """

    def __init_subclass__(cls, rows: str = "", **options: Any) -> None:
        super().__init_subclass__(**options)
        if not rows:
            return
        declared = fields_of_rows(rows)
        cls.__annotations__ = {name: annotation for name, (annotation, _) in declared.items()}
        for name, (_, field) in declared.items():
            setattr(cls, name, field)


def table_fields(config_class: type) -> Iterator[tuple[str, FlagMetadata, Any]]:
    """Yield name, metadata and default of each field that a class inherits from tables.

    They are as the tables declare them, whatever a class that is derived from them declares anew.
    """
    for base in config_class.__mro__:
        if FlagTable in base.__bases__:
            declared: Any = base
            for field in dataclasses.fields(declared):
                yield field.name, metadata_of(field), default_of(field)


def fields_of_rows(rows: str) -> dict[str, tuple[Any, Any]]:
    """Return for each row the name of a field, its type, and the field of a dataclass."""
    found: dict[str, tuple[Any, Any]] = {}
    told: dict[str, Any] = {}
    for line in filter(None, map(str.strip, rows.splitlines())):
        heading = _heading(line)
        if heading is not None:
            told = heading
            continue
        name, annotation, field = _field(line, told)
        assert name not in found, f"two rows declare {name}"
        found[name] = annotation, field
    return found


def _heading(line: str) -> dict[str, str] | None:
    form, _, text = line.partition(": ")
    if form in _FORMS:
        return {_FORMS[form]: text, "help": f"{form.capitalize()}: {text}."}
    word, _, owner = line.partition(" ")
    if word == "of":
        return {"part_of": owner, "help": f"Tunes {owner.replace('_', '-')}."}
    return None


def _field(row: str, told: dict[str, Any]) -> tuple[str, Any, Any]:
    left, _, default_text = row.partition(" = ")
    words = left.split()
    own_name, _, arg = ("" if words[0].startswith("--") else words.pop(0)).partition(":")
    spellings = [word for word in words if word.startswith("--")]
    kind, *details = words[len(spellings) :]
    # The name of an off-switch is that of what it turns off.
    name = own_name or spellings[0].removeprefix("--").replace("-", "_")
    if kind == "off-switch" and not own_name:
        name = name.removeprefix("no_").removeprefix("disable_")
    told = {**told, "name": arg or name, "is_flag": bool(spellings)}
    if kind in ("on", "off-switch"):
        return name, bool, flag(kind == "off-switch", *spellings, **told)
    element = _ELEMENTS[kind.rstrip(":")]
    choices = [element(text) for text in details[-1].split("/")] if kind.endswith(":") else []
    nargs = next((word[1:] for word in details if word.startswith("x")), None)
    default: Any = None
    if default_text:
        default = _EMPTY[default_text] if default_text in _EMPTY else element(default_text)
    annotation = list[element] if nargs in ("+", "*") else element  # type: ignore[valid-type]
    field = flag(default, *spellings, choices=choices, nargs=nargs, **told)
    return name, annotation | None, field
