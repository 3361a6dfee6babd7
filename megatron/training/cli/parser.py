"""The parser of the command line, generated from the config dataclasses.

One error lists all problems of a command line: unknown flags, values of the wrong type and unknown
choices.
"""

from __future__ import annotations

import argparse
import difflib
import re
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, NoReturn

from megatron.core.foundation.errors import ConfigError, MegatronError, described_together
from megatron.core.settings.command_line import add_flag
from megatron.core.settings.flags import FlagSpec
from megatron.training.cli.help import Help, HelpFormatter
from megatron.training.cli.suggest import suggestion
from megatron.training.cli.yaml_file import read_yaml
from megatron.training.config.run import GROUP_CLASSES, RunConfig, all_flags, flags_by_spelling

ExtraArguments = Callable[[argparse.ArgumentParser], argparse.ArgumentParser]
DeepSpeedReader = Callable[[str, Mapping[str, Any]], tuple[dict[str, Any], list[str]]]
"""(path of a DeepSpeed configuration, values of the given fields) -> (values of fields from the
file, one line for each key in the file that has no effect)."""


@dataclass(frozen=True, kw_only=True)
class ParsedCommand:
    """The settings that the user gave."""

    config: RunConfig
    extra: Mapping[str, Any] = field(default_factory=dict)
    """Values of arguments that a script added to the parser."""
    given: frozenset[str] = frozenset()
    """Fields that the command line, a file, a preset or a model sets; others have a default."""
    notes: tuple[str, ...] = ()
    """Log lines on settings in the user's files that have no effect."""


class UnreadableCommandError(ConfigError):
    """All problems of a command line, with the settings that are valid."""

    command = ParsedCommand(config=RunConfig())

    def __init__(
        self,
        problems: Sequence[MegatronError] | str,
        command: ParsedCommand | None = None,
        **parts: Any,
    ) -> None:
        if isinstance(problems, str):
            super().__init__(problems, **parts)
            return
        super().__init__(described_together(problems, summary="this command line"))
        self.problems = tuple(problems)
        self.command = command or self.command


class CommandParser(argparse.ArgumentParser):
    """An argparse parser that raises `ConfigError` and never abbreviates."""

    def __init__(self, **options: Any) -> None:
        super().__init__(
            allow_abbrev=False,
            argument_default=argparse.SUPPRESS,
            formatter_class=HelpFormatter,
            exit_on_error=False,
            add_help=False,
            **options,
        )
        # "-1,0" is a value (--window-size), not a flag.
        self._negative_number_matcher = re.compile(r"^-\d[\d.,eE+-]*$")
        self.problems: list[MegatronError] = []
        self.unreadable: set[str] = set()
        """Fields with an invalid value."""
        self.replaced: set[str] = set()
        """Inert fields that a script's flag of the same spelling replaces."""

    def with_known_spellings(self, words: Sequence[str]) -> list[str]:
        """Return the command line with `_` and `-` in names of flags replaced as declared."""
        declared = self._option_string_actions
        by_dashes = {spelling.replace("_", "-"): spelling for spelling in declared}
        found = []
        for word in words:
            name, sign, value = word.partition("=")
            if name.startswith("--") and name not in declared:
                name = by_dashes.get(name.replace("_", "-"), name)
            found.append(name + sign + value)
        return found

    def error(self, message: str) -> NoReturn:
        """Raise argparse's message instead of exiting."""
        raise ConfigError(f"the command line cannot be read: {message}.", fix="see --help")


def build_parser(
    extra_args_provider: ExtraArguments | None = None, prog: str | None = None
) -> CommandParser:
    """Return a parser of all flags, including the flags that `extra_args_provider` adds.

    A script's flag may have the spelling of an inert flag and replaces it.
    """
    parser = CommandParser(
        prog=prog,
        usage="%(prog)s [flags]",
        description="Pretrain a transformer. docs/flags.md has all flags in tables.",
    )
    groups: dict[str, Any] = {}
    parser.add_argument("-h", "--help", action=Help, groups=groups)
    for spec in all_flags().values():
        if spec.group not in groups:
            doc = (GROUP_CLASSES[spec.group].__doc__ or "").strip().splitlines()[0]
            groups[spec.group] = parser.add_argument_group(doc.rstrip("."))
        _add(groups[spec.group], spec, parser)
    if extra_args_provider is not None:
        _extend(parser, extra_args_provider)
    return parser


def _extend(parser: CommandParser, provider: ExtraArguments) -> None:
    """Add a script's flags; they replace inert flags of the same spelling."""
    before = set(parser._actions)
    ours = dict(parser._option_string_actions)
    parser.conflict_handler = parser._optionals.conflict_handler = "resolve"
    extended = provider(parser)
    if extended is not None and extended is not parser:
        raise TypeError("extra_args_provider must return the parser that it receives")
    for spelling, action in ours.items():
        if parser._option_string_actions[spelling] is action:
            continue
        spec = all_flags().get(action.dest)
        if spec is None or spec.group != "inert":
            raise argparse.ArgumentError(action, f"conflicting option string: {spelling}")
        parser.replaced.add(spec.name)
    # argument_default=SUPPRESS separates given values of our flags; a script's flags have defaults.
    for action in set(parser._actions) - before:
        if action.default is argparse.SUPPRESS and action.dest != argparse.SUPPRESS:
            action.default = None


def _add(group: Any, spec: FlagSpec, parser: CommandParser) -> None:
    text = spec.help + (f" One of {', '.join(map(str, spec.choices))}." if spec.choices else "")
    if spec.is_switch:
        add_flag(group, spec, default=argparse.SUPPRESS, help=text.replace("%", "%%"))
        group.add_argument(
            *spec.opposites,
            dest=spec.name,
            action="store_true" if spec.default else "store_false",
            default=argparse.SUPPRESS,
            help=argparse.SUPPRESS,
        )
        return

    def convert(value: str) -> Any:
        try:
            return spec.convert(value)
        except ValueError as reason:
            parser.problems.append(bad_value(spec, value, str(reason)))
            parser.unreadable.add(spec.name)
            return None

    default = "" if spec.default in (None, []) else f" [{_shown(spec.default)}]"
    add_flag(
        group,
        spec,
        type=convert,
        default=argparse.SUPPRESS,
        metavar=spec.element.__name__.upper() if not spec.choices else "NAME",
        help=(text + default).replace("%", "%%"),
    )


def _shown(value: Any) -> str:
    if isinstance(value, list):
        return " ".join(map(_shown, value))
    return getattr(value, "name", None) or str(value)


def bad_value(spec: FlagSpec, value: object, reason: str) -> ConfigError:
    """Return the error for a value that is invalid for `spec`."""
    allowed = [str(c) for c in spec.choices if c not in spec.metadata.refuse_values]
    near: Any = (difflib.get_close_matches(str(value), allowed, n=1) or [spec.default])[0]
    if near is None:
        near = (*allowed, spec.example())[0]
    return ConfigError(
        f"{spec.flag} {value!r}: {value!r} {reason}.",
        rule=f"{spec.flag} takes {spec.type_text()}",
        flags=[spec.flag],
        fix=f"use {spec.flag} {_shown(near)}" if near not in ("", []) else "correct the value",
    )


def parse_command_line(
    argv: Sequence[str] | None = None,
    *,
    extra_args_provider: ExtraArguments | None = None,
    args_defaults: Mapping[str, object] | None = None,
    ignore_unknown_args: bool = False,
    deepspeed_reader: DeepSpeedReader | None = None,
) -> ParsedCommand:
    """Read the command line and the files that it names.

    Precedence, highest first: command line, YAML file, DeepSpeed configuration, Hugging Face model
    or preset, `args_defaults` of the script, defaults of the fields. Flags that contradict the
    model of --load-hf or the file of --deepspeed_config are refused. A script's default of
    `seq_length` is reduced to the number of positions of the model.

    Args:
        deepspeed_reader: reads the file of --deepspeed_config; without a reader, the flag is
            refused.
    Raises:
        UnreadableCommandError: the command line or a file is invalid. The error lists all problems
            and contains the valid settings.
    """
    words = sys.argv[1:] if argv is None else list(argv)
    values, extra, unknown, problems = _read_words(words, extra_args_provider)
    if not ignore_unknown_args:
        problems += _unknown_flags(unknown)
    command_line = {n: _unwrapped(all_flags()[n], value) for n, value in values.items()}
    from_yaml: dict[str, Any] = {}
    if command_line.get("yaml_cfg"):
        from_yaml = read_yaml(command_line["yaml_cfg"], problems)
    given, from_preset = {**from_yaml, **command_line}, dict[str, Any]()
    with _collected(problems):
        if given.get("preset"):
            # Imported here: published models need torch, and converters safetensors.
            from megatron.training.cli.preset import preset_values

            from_preset = preset_values(given["preset"])
    with _collected(problems):
        if given.get("load_hf"):
            from megatron.training.cli.hugging_face import adapter_values, model_values

            built = {**(args_defaults or {}), **given}.get("architecture")
            from_model = model_values(
                given["load_hf"], given, problems, reads_images=built == "vlm"
            )
            from_preset |= from_model | adapter_values(given["load_hf"], given, problems)
    defaults = {n: v for n, v in (args_defaults or {}).items() if n in all_flags()}
    if "seq_length" in defaults and "max_position_embeddings" in from_preset:
        longest = {**from_preset, **given}["max_position_embeddings"]
        defaults["seq_length"] = min(defaults["seq_length"], longest)
    from_deepspeed, notes = _deepspeed_values(deepspeed_reader, given, problems)
    asked = {**from_preset, **from_deepspeed, **given}
    command = ParsedCommand(
        config=RunConfig.from_values({**defaults, **asked}),
        extra=extra,
        given=frozenset(asked),
        notes=tuple(notes),
    )
    if problems:
        raise UnreadableCommandError(problems, command)
    return command


@contextmanager
def _collected(problems: list[MegatronError]) -> Iterator[None]:
    """Add an error of the block to `problems`."""
    try:
        yield
    except MegatronError as problem:
        problems.append(problem)


def _read_words(
    words: Sequence[str], extra_args_provider: ExtraArguments | None
) -> tuple[dict[str, Any], dict[str, Any], list[str], list[MegatronError]]:
    """Return (our values by name, values of the script's flags, unknown words, problems).

    argparse stops at the first flag with too few values, so the words are read again without it.
    """
    incomplete: list[MegatronError] = []
    while True:
        parser = build_parser(extra_args_provider)
        words = parser.with_known_spellings(words)
        try:
            namespace, unknown = parser.parse_known_args(words)
        except argparse.ArgumentError as error:
            spellings = (error.argument_name or "").split("/")
            place = next((i for i, w in enumerate(words) if w.split("=")[0] in spellings), None)
            incomplete.append(_incomplete(error, spellings[0]))
            if place is None:
                return {}, {}, [], incomplete
            rest = place + 1
            while rest < len(words) and not words[rest].startswith("--"):
                rest += 1
            words = [*words[:place], *words[rest:]]
            continue
        values = {n: v for n, v in vars(namespace).items() if n not in parser.unreadable}
        ours = {n: values.pop(n) for n in all_flags() if n in values and n not in parser.replaced}
        return ours, values, unknown, [*parser.problems, *incomplete]


def _incomplete(error: argparse.ArgumentError, flag: str) -> ConfigError:
    spec = flags_by_spelling().get(flag)
    example = "" if spec is None else f", for example {flag} {spec.example(spec.metadata.nargs)}"
    return ConfigError(
        f"the command line cannot be read: {error}.",
        rule="the values of a flag follow it" + ("" if spec is None else f": {spec.type_text()}"),
        flags=[flag],
        fix=f"give it{example}",
    )


def _unwrapped(spec: FlagSpec, value: Any) -> Any:
    """Replace a list of one value by the value if the flag's default is a single value."""
    if spec.metadata.nargs == "+" and len(value) == 1 and not isinstance(spec.default, list):
        annotated_as_list = spec.default is None
        return value if annotated_as_list else value[0]
    return value


def _unknown_flags(unknown: Sequence[str]) -> list[MegatronError]:
    """Return an error for each unknown flag and each value without a flag."""
    problems: list[MegatronError] = []
    after_unknown_flag = False
    for token in unknown:
        if not token.startswith("--"):
            if not after_unknown_flag:
                problems.append(
                    ConfigError(
                        f"{token!r} on the command line belongs to no flag.",
                        rule="every value follows a --flag",
                        fix="check the flag before it, which may take fewer values",
                    )
                )
            continue
        after_unknown_flag = "=" not in token
        name = token.split("=")[0]
        near = suggestion(name)
        problems.append(
            ConfigError(
                f"unknown flag {name}.",
                rule="flags are spelled in full; abbreviations are not expanded",
                flags=[name],
                fix=f"did you mean {near}?" if near else "--help WORD finds flags by a word",
            )
        )
    return problems


def _deepspeed_values(
    reader: DeepSpeedReader | None, given: Mapping[str, Any], problems: list[MegatronError]
) -> tuple[dict[str, Any], list[str]]:
    path, is_on = given.get("deepspeed_config"), given.get("deepspeed", False)
    flags = ["--deepspeed", "--deepspeed_config"]
    if bool(path) != is_on:
        found = "--deepspeed without --deepspeed_config"
        problems.append(
            ConfigError(
                f"{found if is_on else f'--deepspeed_config {path} without --deepspeed'}.",
                rule="--deepspeed enables the configuration, and --deepspeed_config names its file",
                flags=flags,
                fix="give both",
            )
        )
    elif path and reader is None:
        problems.append(
            ConfigError(
                f"--deepspeed_config {path} in a script that reads no DeepSpeed configuration.",
                rule="the script passes the reader to pretrain()",
                flags=flags,
                fix="pass deepspeed_reader=megatron_lattice.read_deepspeed_config to pretrain(), as"
                " pretrain_gpt.py does",
            )
        )
    elif path and reader is not None:
        try:
            return reader(path, given)
        except MegatronError as problem:
            problems += problem.problems or [problem]
    return {}, []
