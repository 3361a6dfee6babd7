"""The flags of a tool are the fields of a dataclass."""

import argparse
from dataclasses import dataclass
from enum import Enum
from pathlib import Path

import pytest

from megatron.core.settings.command_line import (
    Subcommand,
    add_flags,
    read_command_line,
    run_subcommand,
    settings_of,
)
from megatron.core.settings.flags import flag, no_flag, positional
from megatron.training.cli.parser import parse_command_line
from tests.harness.unread_stdout import unread_stdout


class Color(Enum):
    red = "dark-red"
    blue = "dark-blue"


@dataclass(frozen=True, kw_only=True)
class OutputFlags:
    """What is written.

    The second line is not in the title.
    """

    out: Path
    """Where to."""
    is_quick: bool = flag(False, "--quick")


@dataclass(frozen=True, kw_only=True)
class Flags:
    """All kinds of flags."""

    script: str = positional()
    script_words: tuple[str, ...] = positional((), nargs=argparse.REMAINDER)
    output: OutputFlags
    num_gpus: int = flag(-1, "--num_gpus", "-g")
    """Of a machine (%(default)s)."""
    sizes: tuple[int, ...] = (1, 2)
    triple: tuple[str, str, str] | None = flag(None, metavar=("A", "B", "C"))
    color: Color = flag(Color.red, values={one.value: one for one in Color})
    stop: tuple[str, ...] = flag((), is_repeated=True)
    word: str = flag("print", parse=str.lower)
    old: str | None = flag(None, nargs="?", is_hidden=True)
    derived: int = no_flag(7)


def test_without_flags_the_fields_have_their_defaults():
    assert read_command_line(Flags, ["--out", "o", "s"]) == Flags(
        script="s", output=OutputFlags(out=Path("o"))
    )


def test_each_kind_of_flag_sets_its_field():
    words = "--out o --quick -g 4 --sizes 3 --triple x y z --color dark-blue --stop a --stop b"
    words += " --old --word SSH s -x --out"
    assert read_command_line(Flags, words.split()) == Flags(
        script="s",
        script_words=("-x", "--out"),
        output=OutputFlags(out=Path("o"), is_quick=True),
        num_gpus=4,
        sizes=(3,),
        triple=("x", "y", "z"),
        color=Color.blue,
        stop=("a", "b"),
        word="ssh",
        old="",
    )


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("s", "the following arguments are required: --out"),
        ("--out o", "the following arguments are required: script"),
        ("--out o --num_gpus x s", "argument --num_gpus/-g: 'x' is not an int"),
        ("--out o --color red s", "--color: 'red' is not one of dark-red, dark-blue"),
        ("--out o --no-quick s", "unrecognized arguments: --no-quick"),
    ],
)
def test_what_is_wrong_ends_with_status_2(words, message, capsys):
    with pytest.raises(SystemExit, match="2"):
        read_command_line(Flags, words.split())
    assert message in capsys.readouterr().err


def test_the_help_is_made_of_docstrings(capsys):
    with pytest.raises(SystemExit, match="0"):
        read_command_line(Flags, ["--help"], description="Try\nflags.")
    text = capsys.readouterr().out
    assert "Try\nflags." in text
    assert "\nWhat is written:\n  --out OUT" in text
    assert "Of a machine (-1)." in text
    assert "--color {dark-red,dark-blue}" in text
    assert "--old" not in text and "--derived" not in text


@pytest.mark.parametrize(
    "read",
    [
        lambda: read_command_line(Flags, ["--help"]),
        lambda: parse_command_line(["--help"]),
        lambda: parse_command_line(["--help", "lr"]),
    ],
)
def test_help_may_be_read_in_part(read):
    with unread_stdout(), pytest.raises(SystemExit, match="0"):
        read()


@dataclass(frozen=True, kw_only=True)
class Sum:
    """Add numbers."""

    numbers: tuple[int, ...] = positional()


@dataclass(frozen=True, kw_only=True)
class Nothing:
    """Do nothing."""


def test_a_subcommand_gets_its_own_settings(capsys):
    commands = {
        "sum": Subcommand(Sum, lambda asked: sum(asked.numbers)),
        "nothing": Subcommand(Nothing, lambda _: 0, "Rest.\n\nFor long."),
    }
    assert run_subcommand(commands, ["sum", "1", "2"]) == 3
    assert run_subcommand(commands, ["nothing"]) == 0
    with pytest.raises(SystemExit, match="0"):
        run_subcommand(commands, ["--help"])
    assert "Add numbers." in capsys.readouterr().out


def test_flags_can_stand_on_the_parser_of_another():
    parser = argparse.ArgumentParser()
    parser.add_argument("--other", default=1)
    add_flags(parser, OutputFlags)
    values = vars(parser.parse_args(["--out", "o"]))
    assert settings_of(OutputFlags, values) == OutputFlags(out=Path("o"))
