"""Derive command-line flags from dataclass fields.

`hidden_dropout: float = 0.1` gives `--hidden-dropout FLOAT`; the docstring under the field is the
help. A `bool` that is False becomes a switch, a `bool` that is True an off-switch (`--no-X` and
`--disable-X`). `flag(...)` declares a field whose flag differs from this, and `no_flag(...)` a
field without a flag.

The library's config dataclasses declare the fields. A `SettingsGroup` inherits from several of them
and replaces the defaults that differ on the command line.
"""

from __future__ import annotations

import dataclasses
import enum
import functools
import math
import types
import typing
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from typing import Any

from megatron.core.settings.config_base import field_docs

_KEY = "flag"
_SAME: Any = object()
GroupT = typing.TypeVar("GroupT")


@dataclass(frozen=True, kw_only=True)
class FlagMetadata:
    """Properties of a flag that do not follow from the field's name, type, default or docstring."""

    name: str = ""
    """Name on the command line and on `get_args()`. Default: the field's name."""
    cli_default: Any = _SAME
    """Default on the command line, if it differs from the field's default. With None, `resolve`
    derives the value, or a rule reports that the flag is missing."""
    kind: type | None = None
    """Type of the value on the command line, if it is narrower than the field's type."""
    help: str = ""
    """Replaces the docstring. An off-switch describes the effect of switching the field off."""
    values: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    """Word on the command line -> value of the field."""
    is_flag: bool = True
    is_arg: bool = True
    """Whether `get_args()` shows it."""
    spellings: tuple[str, ...] = ()
    """Replace `--kebab-case`. Help and messages show the first one."""
    choices: Collection[str | int] = ()
    """Allowed values, read at parse time: a registry may have grown since the declaration."""
    nargs: int | str | None = None
    """Number of values. Default: from the type, so `tuple[int, int]` takes two values and
    `list[int]` one or more."""
    parse: Callable[[str], Any] | None = None
    """Converts the text of one value, or raises ValueError with the reason."""
    type_text: str = ""
    """Shown as the type of a flag that has its own `parse`."""
    refuse: str = ""
    """The mechanism does not exist here: any value but the default is refused with this text, which
    names an alternative."""
    refuse_values: Mapping[Any, str] = dataclasses.field(default_factory=dict)
    """Refused values of a flag whose other values have an effect, each with an alternative."""
    note: str = ""
    """The flag is accepted and changes no result; this line informs the user."""
    note_values: Mapping[Any, str] = dataclasses.field(default_factory=dict)
    """Values without an effect of a flag whose other values have one, each with such a line."""
    only_on_gpu: str = ""
    """The flag has an effect on GPUs only; this text describes other devices."""
    per_micro_batch: str | Mapping[object, str] = ""
    """Why the result depends on which samples and tokens share a micro batch or a rank. Dynamic
    context parallelism is refused with such a flag, if its value is not None, 0 or False. A mapping
    gives the reason for single values."""
    part_of: tuple[str, ...] = ()
    """This field tunes these fields, and has no effect unless one of them is set."""
    within: str = ""
    """Range of the value, a rule of `transformer.config.field_values`."""
    metavar: str | tuple[str, ...] = ""
    """Name of the value in the help of a tool."""
    is_positional: bool = False
    is_repeated: bool = False
    """The flag is given once for each value."""
    is_hidden: bool = False
    """The help omits the flag."""
    takes_unknown: bool = False
    """The field collects all words that no other field takes."""


def flag(
    default: object = dataclasses.MISSING,
    *spellings: str,
    part_of: str | tuple[str, ...] = (),
    is_flag: bool = True,
    **properties: object,
) -> Any:
    """Declare a field; a flag without default is required.

    Args:
        part_of, is_flag, properties: see `FlagMetadata`.
    """
    metadata = FlagMetadata(
        spellings=spellings,
        part_of=(part_of,) if isinstance(part_of, str) else part_of,
        is_flag=is_flag,
        is_arg=is_flag,
        **properties,  # type: ignore[arg-type]
    )
    return declared_field(default, metadata)


def positional(default: object = dataclasses.MISSING, **properties: object) -> Any:
    """Declare a field that is a positional argument of the command line.

    Args:
        properties: see `FlagMetadata`; `nargs=argparse.REMAINDER` takes everything that follows.
    """
    metadata = FlagMetadata(is_positional=True, **properties)  # type: ignore[arg-type]
    return declared_field(default, metadata)


def unknown_words() -> Any:
    """Declare a field of type `tuple[str, ...]` that takes all words that no other field takes."""
    return declared_field((), FlagMetadata(takes_unknown=True, is_hidden=True))


def required(*spellings: str) -> Any:
    """Declare a field that `resolve` derives if it is not given; if it cannot, a rule reports it.

    The field is None until then, although its type has no None.
    """
    return flag(None, *spellings)


def no_flag(default: object, *, is_arg: bool = False) -> Any:
    """Declare a field that no flag sets.

    Args:
        is_arg: whether `resolve` derives the field and `get_args()` shows it.
    """
    return declared_field(default, FlagMetadata(is_flag=False, is_arg=is_arg))


def declared_field(default: Any, metadata: FlagMetadata) -> Any:
    if isinstance(default, list):
        return dataclasses.field(default_factory=lambda: list(default), metadata={_KEY: metadata})
    return dataclasses.field(default=default, metadata={_KEY: metadata})


def metadata_of(field: dataclasses.Field[Any]) -> FlagMetadata:
    return field.metadata.get(_KEY) or FlagMetadata()


class SettingsGroup:
    """Base of immutable dataclasses of settings with the defaults of the command line.

    A subclass inherits fields from config dataclasses. `cli_default` replaces a field's default,
    and the class argument `choices={field: ...}` adds choices that the config cannot import.
    """

    _is_frozen = False

    def __init_subclass__(cls, choices: Mapping[str, Collection[str]] | None = None) -> None:
        super().__init_subclass__()
        declared = dict(cls.__dict__.get("__annotations__", {}))
        for base in reversed(cls.__mro__[1:]):
            if not dataclasses.is_dataclass(base):
                continue
            hints = typing.get_type_hints(base)
            for field in dataclasses.fields(base):
                metadata = metadata_of(field)
                default = (
                    default_of(field) if metadata.cli_default is _SAME else metadata.cli_default
                )
                if choices and field.name in choices:
                    metadata = dataclasses.replace(metadata, choices=choices[field.name])
                elif metadata.cli_default is _SAME:
                    continue
                declared.setdefault(field.name, hints[field.name])
                setattr(cls, field.name, declared_field(default, metadata))
        cls.__annotations__ = declared

    def __post_init__(self) -> None:
        object.__setattr__(self, "_is_frozen", True)

    def __setattr__(self, name: str, value: Any) -> None:
        if self._is_frozen:
            raise dataclasses.FrozenInstanceError(f"{type(self).__name__}.{name} is fixed")
        object.__setattr__(self, name, value)


@dataclass(frozen=True)
class FlagSpec:
    """One flag with all its properties, built from a dataclass field by `flag_specs`."""

    name: str
    """Attribute name on `get_args()`."""
    field: str
    """Name of the field, usually equal to `name`."""
    group: str
    """Name of the group that contains the field."""
    element: type
    """Type of one value: int, float, str, bool or an enum."""
    default: Any
    spellings: tuple[str, ...]
    help: str
    metadata: FlagMetadata

    @property
    def flag(self) -> str:
        """Spelling in help and messages."""
        return self.spellings[0]

    @property
    def is_switch(self) -> bool:
        """Whether the flag takes no value."""
        return self.element is bool

    @property
    def is_required(self) -> bool:
        """Whether the command line must give the flag, because it has no default."""
        return self.default is dataclasses.MISSING

    @property
    def opposites(self) -> tuple[str, ...]:
        """Spellings that set a switch to its default and override a file or a preset."""
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
        """Allowed values as the user types them. If empty, every value is allowed."""
        if issubclass(self.element, enum.Enum):
            return tuple(member.name for member in self.element)
        return tuple(self.metadata.values or self.metadata.choices)

    def to_field(self, value: Any) -> Any:
        """Return the field's value for a value on the command line."""
        return self.metadata.values.get(value, value) if self.metadata.values else value

    def to_arg(self, value: Any) -> Any:
        """Return the value on the command line for a value of the field."""
        return next((text for text, known in self.metadata.values.items() if known == value), value)

    def type_text(self) -> str:
        """Describe the type in one word or two: for help, docs and messages."""
        if self.is_switch:
            return "off-switch" if self.default else "on"
        text = "enum" if issubclass(self.element, enum.Enum) else self.element.__name__
        text = self.metadata.type_text or text
        if self.metadata.nargs is not None:
            text += f" x{self.metadata.nargs}"
        if self.choices:
            text += ": " + "/".join(str(choice) for choice in self.choices)
        return text

    def example(self, count: int | str | None = None) -> str:
        """Return example words for this flag, "" without an example."""
        if self.metadata.parse is not None and self.default is None:
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
        if self.metadata.parse is not None:
            return self.metadata.parse(text)
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


def _spellings(name: str, default: Any, is_switch: bool, metadata: FlagMetadata) -> tuple[str, ...]:
    if metadata.is_positional:
        return (name,)
    if not (is_switch and default is True):
        return metadata.spellings or (kebab(name),)
    found = list(metadata.spellings or (f"--no-{name.replace('_', '-')}",))
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


def _num_values(annotation: Any, metadata: FlagMetadata, default: Any) -> int | str | None:
    """Return argparse's `nargs` for a field of this type."""
    if metadata.nargs is not None or metadata.parse is not None or metadata.is_repeated:
        return metadata.nargs
    if typing.get_origin(annotation) in (typing.Union, types.UnionType):
        inner = [a for a in typing.get_args(annotation) if a is not type(None)]
        return _num_values(inner[0], metadata, default)
    is_optional = metadata.is_positional and default is not dataclasses.MISSING
    if typing.get_origin(annotation) not in (list, tuple):
        return "?" if is_optional else None
    elements = typing.get_args(annotation)
    if len(elements) > 1 and elements[-1] is not Ellipsis:
        return len(elements)
    return "*" if is_optional else "+"


def flag_specs(group_class: type, group: str) -> tuple[FlagSpec, ...]:
    """Return the flags of one group dataclass, in the order of its fields."""
    key: typing.Hashable = group_class
    return _flag_specs(key, group)


@functools.cache
def _flag_specs(group_class: Any, group: str) -> tuple[FlagSpec, ...]:
    hints = typing.get_type_hints(group_class)
    docs = field_docs(group_class)
    specs = []
    for field in dataclasses.fields(group_class):
        metadata = metadata_of(field)
        if not metadata.is_flag or dataclasses.is_dataclass(hints[field.name]):
            continue
        nargs = _num_values(hints[field.name], metadata, default_of(field))
        metadata = dataclasses.replace(metadata, nargs=nargs)
        name = metadata.name or field.name
        element = metadata.kind or (str if metadata.values else _element_type(hints[field.name]))
        spec = FlagSpec(
            name=name,
            field=field.name,
            group=group,
            element=element,
            default=default_of(field),
            spellings=_spellings(name, default_of(field), element is bool, metadata),
            help=metadata.help or docs.get(field.name, ""),
            metadata=metadata,
        )
        specs.append(dataclasses.replace(spec, default=spec.to_arg(spec.default)))
    return tuple(specs)


def default_of(field: dataclasses.Field[object]) -> Any:
    """Return the default of a field, `dataclasses.MISSING` if it has none."""
    if field.default_factory is not dataclasses.MISSING:
        return field.default_factory()
    return field.default


def arg_name(field: dataclasses.Field[object]) -> str:
    """Return a setting's name on `get_args()`."""
    return metadata_of(field).name or field.name


def fields_of(base: type[GroupT], group: GroupT) -> dict[str, Any]:
    """Return the fields of `base` with their values in `group`."""
    declared: Any = base
    return {field.name: getattr(group, field.name) for field in dataclasses.fields(declared)}


def from_args(group_class: type[GroupT], values: Mapping[str, object]) -> GroupT:
    """Build a group from names on `get_args()` and values; other fields keep their default."""
    specs = flag_specs(group_class, "")
    return group_class(
        **{spec.field: spec.to_field(values[spec.name]) for spec in specs if spec.name in values}
    )


def derived_args(group_class: type) -> tuple[str, ...]:
    """Return the fields of a group that have no flag and that `get_args()` shows."""
    metadata = {field.name: metadata_of(field) for field in dataclasses.fields(group_class)}
    return tuple(name for name, each in metadata.items() if not each.is_flag and each.is_arg)
