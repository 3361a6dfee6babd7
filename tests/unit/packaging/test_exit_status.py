"""Every tool ends with 0, 1, 2, 130 or 141, and they mean the same everywhere."""

import importlib
import json
import os
import subprocess
import sys

import pytest

from megatron.core.foundation.errors import CheckpointError, ConfigError, DataError, raise_together
from megatron.core.foundation.exit_status import ExitStatus, tool
from tests.harness.pool import REPOSITORY
from tests.harness.unread_stdout import unread_stdout

OF_THE_PROJECT = {"constraints_beside", "lowest_versions"}
"""Parts of `make venv` and `make lowest`."""
SOURCES = {
    path.stem: path.read_text()
    for path in (REPOSITORY / "tools").glob("[a-z]*.py")
    if path.stem not in OF_THE_PROJECT
}
RUNS = sorted(name for name, source in SOURCES.items() if "failures_reported(" in source)
TOOLS = [*sorted(SOURCES.keys() - set(RUNS)), "checkpoint.__main__"]
CANNOT_BE_READ = {
    "checkpoint.__main__": "verify {}",
    "inspect_dataset": "stats {}/nothing",
    "merge_datasets": "--input {}/nothing --output-prefix {}/out",
    "preprocess_data": "--input {}/nothing --output-prefix {}/out --tokenizer-type ByteTokenizer",
    "plot_schedule": "--measured {}/nothing",
    "report": "{}/nothing",
    "compare": "{}/nothing {}/nothing",
}
"""Commands of tools that read files, for files that are not there or damaged."""


def status(name, words):
    main = importlib.import_module(f"tools.{name}").main
    try:
        return main(words)
    except SystemExit as error:
        return error.code or 0


@pytest.mark.parametrize("name", TOOLS)
def test_a_tool_ends_with_2_for_what_cannot_be_asked_and_0_for_help(name, capsys, monkeypatch):
    monkeypatch.setattr(sys, "argv", [name])
    assert status(name, ["--no-such-flag"]) == ExitStatus.WRONG_USAGE
    printed = capsys.readouterr().err
    assert printed
    assert "Traceback" not in printed
    assert status(name, ["--help"]) == ExitStatus.DONE


@pytest.mark.parametrize("name", CANNOT_BE_READ)
def test_a_tool_ends_with_1_for_what_cannot_be_read(name, tmp_path, capsys):
    words = CANNOT_BE_READ[name].replace("{}", str(tmp_path)).split()
    assert status(name, words) == ExitStatus.FAILED
    assert str(tmp_path) in capsys.readouterr().err


@pytest.fixture(scope="module")
def answers(tmp_path_factory):
    done = subprocess.run(
        [sys.executable, "-m", "tests.unit.packaging.help_of_scripts", *RUNS],
        cwd=tmp_path_factory.mktemp("elsewhere"), check=True, timeout=400, text=True,
        env={**os.environ, "PYTHONPATH": str(REPOSITORY)}, stdout=subprocess.PIPE,
    )  # fmt: skip
    return json.loads(done.stdout)


def test_a_tool_that_runs_as_training_does_ends_with_the_codes_of_training(answers):
    assert RUNS == [
        "evaluate_harness", "evaluate_perplexity", "generate", "run_text_generation_server",
    ]  # fmt: skip
    for name, word, code, said in answers:
        if word == "--no-such-flag":
            assert (code, "FATAL[CONFIG]" in said) == (10, True), f"{name}: {said}"


def test_every_script_answers_help_without_the_repository_on_its_path(answers):
    asked = [(name, code, said) for name, word, code, said in answers if word == "--help"]
    assert len(asked) > 60
    assert [one for one in asked if one[1] or "usage: " not in one[2]] == []


@pytest.mark.parametrize(
    ("parts", "expected"),
    [
        ([ConfigError("a")], ExitStatus.WRONG_USAGE),
        ([ConfigError("a"), ConfigError("b")], ExitStatus.WRONG_USAGE),
        ([DataError("a"), DataError("b")], ExitStatus.FAILED),
        ([CheckpointError("a"), ConfigError("b")], ExitStatus.WRONG_USAGE),
        ([KeyboardInterrupt()], ExitStatus.INTERRUPTED),
    ],
)
def test_an_error_decides_how_a_tool_ends(parts, expected):
    @tool
    def main(argv=None):
        if isinstance(parts[0], KeyboardInterrupt):
            raise parts[0]
        raise_together(parts, summary="this command line")

    assert main() == expected


def test_a_tool_ends_quietly_where_nobody_reads_what_it_prints(capsys):
    @tool
    def main(argv=None):
        print("one line")
        return ExitStatus.DONE

    with unread_stdout():
        assert main() == ExitStatus.OUTPUT_CLOSED
    assert not capsys.readouterr().err


def test_a_broken_pipe_to_another_process_is_an_error_of_the_tool():
    @tool
    def main(argv=None):
        raise BrokenPipeError

    with pytest.raises(BrokenPipeError):
        main()
