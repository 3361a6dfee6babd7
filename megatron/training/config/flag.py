"""A dataclass field is a command-line flag: the facts that its name and type do not tell.

`hidden_dropout: float = flag(0.1)` gives `--hidden-dropout FLOAT`; the docstring under the field
is the help. A `bool` that is False becomes a switch, a `bool` that is True an off-switch
(`--no-X` and `--disable-X`). What is irregular is said in `flag(...)` and nowhere else.
"""

from __future__ import annotations

import dataclasses
import enum
import functools
import math
import types
import typing
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from megatron.core.config_base import field_docs

_KEY = "flag"


@dataclass(frozen=True, kw_only=True)
class FlagFacts:
    """What a field says about its flag beyond name, type, default and docstring."""

    spellings: tuple[str, ...] = ()
    """Replace `--kebab-case`; the first is the one shown to users."""
    choices: tuple[str | int, ...] = ()
    nargs: int | str | None = None
    parse: Callable[[str], Any] | None = None
    """Turns the text of one value into the value, or raises ValueError with the reason."""
    type_text: str = ""
    """Shown as the type of a flag that has its own `parse`."""
    refuse: str = ""
    """The mechanism does not exist here: what to use instead. Applies to any other than the
    default value."""
    refuse_values: Mapping[Any, str] = dataclasses.field(default_factory=dict)
    """The same for single values of a flag that otherwise acts."""
    note: str = ""
    """Accepted, and changes no result: the line that tells the user so."""
    part_of: str = ""
    """Field without which this one has no effect, because it only tunes that mechanism."""


def flag(
    default: Any,
    *spellings: str,
    choices: Sequence[str | int] = (),
    nargs: int | str | None = None,
    parse: Callable[[str], Any] | None = None,
    type_text: str = "",
    refuse: str = "",
    refuse_values: Mapping[Any, str] | None = None,
    note: str = "",
    part_of: str = "",
) -> Any:
    """Declare a field whose flag is irregular; see `FlagFacts` for the arguments."""
    facts = FlagFacts(
        spellings=spellings,
        choices=tuple(choices),
        nargs=nargs,
        parse=parse,
        type_text=type_text,
        refuse=refuse,
        refuse_values=refuse_values or {},
        note=note,
        part_of=part_of,
    )
    if isinstance(default, list):
        return dataclasses.field(default_factory=lambda: list(default), metadata={_KEY: facts})
    return dataclasses.field(default=default, metadata={_KEY: facts})


@dataclass(frozen=True)
class FlagSpec:
    """One flag, complete: made from a dataclass field by `flag_specs`."""

    name: str
    """Field name, and attribute name on `get_args()`."""
    group: str
    """Attribute of `RunConfig` that holds the field."""
    element: type
    """Type of one value: int, float, str, bool or an enum."""
    default: Any
    spellings: tuple[str, ...]
    help: str
    facts: FlagFacts

    @property
    def flag(self) -> str:
        """The spelling shown to users."""
        return self.spellings[0]

    @property
    def is_switch(self) -> bool:
        """Whether the flag takes no value."""
        return self.element is bool

    @property
    def opposites(self) -> tuple[str, ...]:
        """Spellings that set a switch to its default, whatever a file or a preset says."""
        if not self.is_switch:
            return ()
        found: list[str] = []
        for spelling in (*self.spellings, kebab(self.name)):
            stem = spelling.removeprefix("--").removeprefix("no-").removeprefix("disable-")
            if spelling != f"--{stem}" or spelling == kebab(self.name) and self.default:
                found.append(f"--{stem}")
            elif not self.default:
                found += [f"--no-{stem}", f"--disable-{stem}"]
        return tuple(s for s in dict.fromkeys(found) if s not in self.spellings)

    @property
    def choices(self) -> tuple[str | int, ...]:
        """Allowed values as the user types them; empty means any."""
        if issubclass(self.element, enum.Enum):
            return tuple(member.name for member in self.element)
        return self.facts.choices

    def type_text(self) -> str:
        """Describe the type in one word or two: for help, docs and messages."""
        if self.is_switch:
            return "off-switch" if self.default else "on"
        text = "enum" if issubclass(self.element, enum.Enum) else self.element.__name__
        text = self.facts.type_text or text
        if self.facts.nargs is not None:
            text += f" x{self.facts.nargs}"
        if self.choices:
            text += ": " + "/".join(str(choice) for choice in self.choices)
        return text

    def example(self, count: int | str | None = None) -> str:
        """Return words that the command line takes for this flag; "" if there is no telling."""
        if self.facts.parse is not None and self.default is None:
            return ""
        plain = {int: 1, float: 0.1}.get(self.element, "")
        value = self.default if self.default not in (None, []) else (*self.choices, plain)[0]
        words = value if isinstance(value, list) else [value] * (count if type(count) is int else 1)
        return " ".join(str(getattr(word, "name", word)) for word in words)

    def convert(self, text: str) -> Any:
        """Turn the text of one value into the value.

        Raises:
            ValueError: with the reason, as a clause that follows the value.
        """
        if self.facts.parse is not None:
            return self.facts.parse(text)
        if issubclass(self.element, enum.Enum):
            if text not in self.choices:
                raise ValueError("is not one of " + ", ".join(map(str, self.choices)))
            return self.element[text]
        kind: Any = self.element
        try:
            value = kind(text)
        except ValueError:
            article = "an" if self.element is int else "a"
            raise ValueError(f"is not {article} {self.element.__name__}") from None
        if isinstance(value, float) and not math.isfinite(value):
            raise ValueError("is not finite")
        if self.choices and value not in self.choices:
            raise ValueError("is not one of " + ", ".join(map(str, self.choices)))
        return value


def kebab(name: str) -> str:
    """Return `--field-name` for `field_name`."""
    return "--" + name.replace("_", "-")


def _spellings(name: str, default: Any, is_switch: bool, facts: FlagFacts) -> tuple[str, ...]:
    if not (is_switch and default is True):
        return facts.spellings or (kebab(name),)
    found = list(facts.spellings or (f"--no-{name.replace('_', '-')}",))
    # A default-on switch is turned off by either prefix, on its own stem or on the field's name.
    prefixes = ("--no-", "--disable-")
    stems = [s.removeprefix(p) for s in found for p in prefixes if s.startswith(p)]
    for stem in [*stems, name.replace("_", "-")]:
        found += [s for s in (f"--no-{stem}", f"--disable-{stem}") if s not in found]
    return tuple(found)


def _element_type(annotation: Any) -> type:
    """Strip `| None`, `list[...]` and `tuple[...]` off an annotation."""
    if typing.get_origin(annotation) in (typing.Union, types.UnionType):
        inner = [a for a in typing.get_args(annotation) if a is not type(None)]
        return _element_type(inner[0])
    if typing.get_origin(annotation) in (list, tuple):
        return _element_type(typing.get_args(annotation)[0])
    return annotation


@functools.cache
def flag_specs(group_class: type, group: str) -> tuple[FlagSpec, ...]:
    """Return the flags of one group dataclass, in the order of its fields."""
    hints = typing.get_type_hints(group_class)
    docs = field_docs(group_class)
    specs = []
    for field in dataclasses.fields(group_class):
        facts = field.metadata.get(_KEY, FlagFacts())
        default = (
            field.default_factory()
            if field.default_factory is not dataclasses.MISSING
            else field.default
        )
        element = _element_type(hints[field.name])
        specs.append(
            FlagSpec(
                name=field.name,
                group=group,
                element=element,
                default=default,
                spellings=_spellings(field.name, default, element is bool, facts),
                help=docs.get(field.name, ""),
                facts=facts,
            )
        )
    return tuple(specs)
