"""Read the command line of a tool into a dataclass with one field per flag.

    @dataclass(frozen=True, kw_only=True)
    class Flags:
        corpora: tuple[str, ...] = positional()
        vocab_size: int
        eod: int | None = None

    flags = read_command_line(Flags, description=__doc__)

`megatron.core.settings.flags` describes how a field becomes a flag. A field without a default is
required. A field whose type is a dataclass is a group of flags, titled by the first line of the
dataclass's docstring. The docstring of a field is its help; argparse fills in `%(default)s`.
"""

from __future__ import annotations

import argparse
import dataclasses
import sys
import typing
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Generic, NoReturn, TypeVar

from megatron.core.foundation import standard_output
from megatron.core.settings.flags import FlagSpec, flag_specs

if TYPE_CHECKING:
    from _typeshed import SupportsWrite

SettingsT = TypeVar("SettingsT")


class _Parser(argparse.ArgumentParser):
    _words: Sequence[str] = ()

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:
        """Parse like argparse, and keep the words for `error`."""
        self._words = sys.argv[1:] if args is None else list(args)
        return super().parse_known_args(args, namespace)

    def error(self, message: str) -> NoReturn:
        """End the process; if arguments are missing, report unknown flags as well."""
        flags = [word.partition("=")[0] for word in self._words if word.startswith("--")]
        known = self._option_string_actions
        unknown = [f for f in flags if f not in known and not self._get_option_tuples(f)]
        if "are required" in message and unknown:
            message = f"unrecognized arguments: {' '.join(unknown)}; {message}"
        super().error(message)

    def print_help(self, file: SupportsWrite[str] | None = None) -> None:
        """Print the help; a reader such as `head` may close the pipe early."""
        if file is None:
            standard_output.write(self.format_help())
        else:
            super().print_help(file)


@dataclass(frozen=True)
class Subcommand(Generic[SettingsT]):
    """One command of a tool."""

    settings: type[SettingsT]
    run: Callable[[SettingsT], int]
    """Returns the exit status."""
    description: str = ""
    """The list of commands shows its first line. Default: the docstring of `settings`."""


@dataclass(frozen=True, kw_only=True)
class NoFlags:
    """Settings of a script whose only flag is --help."""


def read_command_line(
    settings: type[SettingsT],
    argv: Sequence[str] | None = None,
    *,
    prog: str | None = None,
    usage: str | None = None,
    description: str | None = None,
    allow_abbrev: bool = True,
    defaults: Mapping[str, Any] | None = None,
) -> SettingsT:
    """Parse a command line; argparse ends the process with status 2 if it is invalid.

    Args:
        settings: a frozen dataclass.
        argv: words after the program's name. Default: `sys.argv[1:]`.
        defaults: flag name -> value that replaces the declared default; repeated flags add to it.
        prog, usage, description, allow_abbrev: arguments of `argparse.ArgumentParser`.
    """
    parser = _Parser(
        prog=prog,
        usage=usage,
        description=description,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=allow_abbrev,
    )
    add_flags(parser, settings)
    parser.set_defaults(**(defaults or {}))
    values, unknown = parser.parse_known_args(argv)
    return settings_of(settings, vars(values) | _unknown_words(parser, settings, unknown))


def run_subcommand(
    commands: Mapping[str, Subcommand[Any]],
    argv: Sequence[str] | None = None,
    *,
    prog: str | None = None,
    description: str | None = None,
    allow_abbrev: bool = True,
) -> int:
    """Run the command named by the first word with the settings in the other words.

    Returns:
        The command's exit status.
    """
    parser = _Parser(
        prog=prog,
        description=description,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=allow_abbrev,
    )
    parsers = parser.add_subparsers(dest="command", required=True)
    for name, command in commands.items():
        text = command.description or command.settings.__doc__ or ""
        made = parsers.add_parser(
            name,
            help=_first_line(text),
            description=text,
            formatter_class=argparse.RawDescriptionHelpFormatter,
            allow_abbrev=allow_abbrev,
        )
        add_flags(made, command.settings)
    known, unknown = parser.parse_known_args(argv)
    command = commands[known.command]
    values = vars(known) | _unknown_words(parser, command.settings, unknown)
    return command.run(settings_of(command.settings, values))


def flags_provider(
    settings: type,
) -> Callable[[argparse.ArgumentParser], argparse.ArgumentParser]:
    """Return an `extra_args_provider` that adds a dataclass's flags to the training flags."""

    def provide(parser: argparse.ArgumentParser) -> argparse.ArgumentParser:
        add_flags(parser, settings, title=_title_of(settings))
        return parser

    return provide


def add_flags(parser: argparse.ArgumentParser, settings: type, title: str = "") -> None:
    """Declare the flags of a dataclass on an argparse parser, in a group if it has a title."""
    place = parser.add_argument_group(title) if title else parser
    for spec in flag_specs(settings, ""):
        if not spec.metadata.takes_unknown:
            add_flag(place, spec)
    for _, nested in _groups(settings):
        add_flags(parser, nested, _title_of(nested))


def add_flag(parser: argparse._ActionsContainer, spec: FlagSpec, **options: Any) -> None:
    """Declare one flag on an argparse parser.

    Args:
        options: arguments of `add_argument` that replace the declared ones.
    """
    found: dict[str, Any] = {"help": spec.help, "default": spec.default}
    if spec.metadata.is_hidden:
        found["help"] = argparse.SUPPRESS
    if spec.is_required:
        found |= {"default": None, "required": True}
    if spec.metadata.is_positional:
        found.pop("required", None)
    else:
        found["dest"] = spec.name
    if spec.is_switch:
        found["action"] = "store_false" if spec.default else "store_true"
    else:
        found |= {"type": _converter(spec), "nargs": spec.metadata.nargs}
        found["metavar"] = spec.metadata.metavar or None
        if spec.choices and not spec.metadata.metavar:
            found["metavar"] = "{" + ",".join(map(str, spec.choices)) + "}"
        if spec.metadata.nargs == "?" and not spec.metadata.is_positional:
            found["const"] = ""
    if spec.metadata.is_repeated:
        found |= {"action": "append", "default": list(spec.default)}
    parser.add_argument(*spec.spellings, **found | options)


def settings_of(settings: type[SettingsT], values: Mapping[str, Any]) -> SettingsT:
    """Build the dataclass from the parsed values of the flags that `add_flags` declared."""
    found: dict[str, Any] = {
        name: settings_of(nested, values) for name, nested in _groups(settings)
    }
    for spec in flag_specs(settings, ""):
        value = values[spec.name]
        found[spec.field] = tuple(value) if isinstance(value, list) else spec.to_field(value)
    return settings(**found)


def value_in(words: Sequence[str], flag: str) -> str:
    """Return the last value of a flag in another program's command line, "" if it is absent."""
    value = ""
    for number, word in enumerate(words):
        if word == flag and number + 1 < len(words):
            value = words[number + 1]
        elif word.startswith(f"{flag}="):
            value = word.partition("=")[2]
    return value


def _unknown_words(
    parser: argparse.ArgumentParser, settings: type, words: Sequence[str]
) -> dict[str, tuple[str, ...]]:
    """Return {field: unknown words} if a field takes them, else end the process with an error."""
    for spec in flag_specs(settings, ""):
        if spec.metadata.takes_unknown:
            return {spec.name: tuple(words)}
    if words:
        parser.error(f"unrecognized arguments: {' '.join(words)}")
    return {}


def _groups(settings: type) -> Iterator[tuple[str, type]]:
    """Yield (name, type) of each field whose type is a dataclass."""
    hints = typing.get_type_hints(settings)
    for field in dataclasses.fields(settings):
        if dataclasses.is_dataclass(hints[field.name]):
            yield field.name, hints[field.name]


def _converter(spec: FlagSpec) -> Callable[[str], Any]:
    def convert(text: str) -> Any:
        try:
            return spec.convert(text)
        except ValueError as reason:
            raise argparse.ArgumentTypeError(f"{text!r} {reason}") from None

    return convert


def _title_of(settings: type) -> str:
    return _first_line(settings.__doc__ or "").rstrip(".")


def _first_line(text: str) -> str:
    return text.strip().split("\n")[0]
