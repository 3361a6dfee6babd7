"""Flags as rows of text: of parts that are not here, which nothing reads.

A heading says what becomes of the flags below it, in the words of docs/flags.md:

    no effect: REASON        accepted; the run says the reason in a line
    refused: INSTEAD         any value but the default stops the run
    of NAME                  tunes the mechanism of that flag, and has no effect without it

A row has the spellings of one flag, its type and, after "=", its default:

    --exchange-algorithm str: broadcast/gather = broadcast
    --pin-buffers        on
    --no-pin-buffers     off-switch
    --names              str x+
"""

from __future__ import annotations

from typing import Any

from megatron.core.settings.flags import flag

_ELEMENTS: dict[str, Any] = {"int": int, "float": float, "str": str}
_FORMS = {"no effect": "note", "refused": "refuse"}


class FlagTable:
    """Base of a dataclass whose fields are the rows that it is declared with."""

    def __init_subclass__(cls, rows: str) -> None:
        super().__init_subclass__()
        declared = fields_of_rows(rows)
        cls.__annotations__ = {name: annotation for name, (annotation, _) in declared.items()}
        for name, (_, field) in declared.items():
            setattr(cls, name, field)


def fields_of_rows(rows: str) -> dict[str, tuple[Any, Any]]:
    """Return for each row the name of a field, its type, and the field of a dataclass."""
    found: dict[str, tuple[Any, Any]] = {}
    told: dict[str, Any] = {}
    for line in filter(None, map(str.strip, rows.splitlines())):
        if line.startswith("--"):
            name, annotation, field = _field(line, told)
            assert name not in found, f"two rows declare {name}"
            found[name] = annotation, field
        else:
            told = _heading(line)
    return found


def _heading(line: str) -> dict[str, str]:
    form, _, text = line.partition(": ")
    if form in _FORMS:
        return {_FORMS[form]: text, "help": f"{form.capitalize()}: {text}."}
    word, _, owner = line.partition(" ")
    assert word == "of", f"{line!r} is no heading"
    return {"part_of": owner, "help": f"Tunes {owner.replace('_', '-')}."}


def _field(row: str, told: dict[str, Any]) -> tuple[str, Any, Any]:
    left, _, default_text = row.partition(" = ")
    words = left.split()
    spellings = [word for word in words if word.startswith("--")]
    kind, *details = words[len(spellings) :]
    # The name of an off-switch is that of what it turns off.
    name = spellings[0].removeprefix("--").replace("-", "_")
    if kind == "off-switch":
        name = name.removeprefix("no_").removeprefix("disable_")
    if kind in ("on", "off-switch"):
        return name, bool, flag(kind == "off-switch", *spellings, name=name, **told)
    element = _ELEMENTS[kind.rstrip(":")]
    choices = [element(text) for text in details[-1].split("/")] if kind.endswith(":") else []
    nargs = next((word[1:] for word in details if word.startswith("x")), None)
    default: Any = None
    if default_text:
        default = [] if default_text == "[]" else element(default_text)
    annotation = list[element] if nargs in ("+", "*") else element  # type: ignore[valid-type]
    field = flag(default, *spellings, name=name, choices=choices, nargs=nargs, **told)
    return name, annotation | None, field
