"""`--help`, `--help GROUP` and `--help WORD`."""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence
from typing import Any, NoReturn

from megatron.core.foundation import standard_output
from megatron.core.foundation.errors import ConfigError


class HelpFormatter(argparse.HelpFormatter):
    """Wider columns than argparse's own."""

    def __init__(self, prog: str) -> None:
        super().__init__(prog, max_help_position=44, width=100)


class Help(argparse.Action):
    """Print all flags, the flags of one group, or the flags with a word in their name or help.

    Args:
        groups: name -> group of flags. Flags of a script are in none, and are found by a word.
    """

    def __init__(
        self,
        option_strings: Sequence[str],
        *,
        groups: Mapping[str, argparse._ArgumentGroup],
        **_options: object,
    ) -> None:
        super().__init__(
            option_strings,
            dest=argparse.SUPPRESS,
            nargs="?",
            default=argparse.SUPPRESS,
            metavar="GROUP|WORD",
            help="show all flags, the flags of a group, or the flags with a word, and exit",
        )
        self.groups = groups

    def __call__(
        self,
        parser: argparse.ArgumentParser,
        _namespace: argparse.Namespace,
        values: Any,
        _option_string: str | None = None,
    ) -> NoReturn:
        """Print and exit."""
        if values is None:
            standard_output.write(
                f"{parser.format_help()}\n"
                f"--help GROUP shows the flags of one group: {', '.join(self.groups)};\n"
                "--help WORD shows the flags with the word in their name or help.\n"
            )
        else:
            standard_output.write(help_about(parser, values, self.groups) + "\n")
        parser.exit()
        raise AssertionError


def help_about(
    parser: argparse.ArgumentParser, topic: str, groups: Mapping[str, argparse._ArgumentGroup]
) -> str:
    """Return the help of one group, or of the flags with a word.

    Raises:
        ConfigError: there is no such group and no such flag.
    """
    word = topic.lower().lstrip("-").replace("_", "-")
    by_name = {name.replace("_", "-"): group for name, group in groups.items()}
    shown = [by_name[word]] if word in by_name else parser._action_groups
    formatter = HelpFormatter(parser.prog)
    num_found = 0
    for group in shown:
        actions = [
            action
            for action in group._group_actions
            if action.help is not argparse.SUPPRESS and (word in by_name or _has(action, word))
        ]
        num_found += len(actions)
        if actions:
            formatter.start_section(group.title)
            formatter.add_arguments(actions)
            formatter.end_section()
    if not num_found:
        raise ConfigError(
            f"--help {topic}: no group and no flag has this name or word.",
            rule=f"groups are {', '.join(groups)}",
            flags=["--help"],
            fix="use another word, or see docs/flags.md",
        )
    return formatter.format_help().rstrip()


def _has(action: argparse.Action, word: str) -> bool:
    is_in_name = any(word in option.replace("_", "-") for option in action.option_strings)
    return is_in_name or word in (action.help or "").lower()
