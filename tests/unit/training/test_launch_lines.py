"""Launch lines as people write them for Megatron-LM pass a dry run, without their files."""

import random
import runpy
import shlex
import sys
import tomllib
from pathlib import Path

import pytest

from megatron.core.foundation.errors import MegatronError
from megatron.training.cli.dry_run import describe_run
from megatron.training.cli.parser import parse_command_line
from tests.harness.pool import REPOSITORY
from tests.parity.recipe_lines import draw_line, is_shared, refusals_of
from tests.parity.recipe_lines import words_of as words_of_line

FIXTURE = Path(__file__).parents[2] / "fixtures" / "compatibility" / "launch_lines.toml"
FOUND = tomllib.loads(FIXTURE.read_text())


def parsed(name):
    """Read a line as the script does that it is for."""
    architecture = FOUND["lines"][name].get("architecture", "gpt")
    return parse_command_line(words_of(name), args_defaults={"architecture": architecture})


def words_of(name):
    line = FOUND["lines"][name]
    flags = FOUND["bases"].get(line.get("base"), "") + line["flags"]
    return [*shlex.split(flags), "--dry-run", "--dry-run-world-size", str(line["ranks"])]


@pytest.mark.parametrize("name", FOUND["lines"])
def test_a_launch_line_can_be_planned(name):
    """`refused` in the fixture says what is not here yet: nothing else is refused."""
    refused = FOUND["lines"][name].get("refused", [])
    if not refused:
        report = describe_run(lambda: parsed(name))
        assert ("not on this machine" in report) == ("--mock-data" not in words_of(name))
        return
    with pytest.raises(MegatronError) as caught:
        describe_run(lambda: parsed(name))
    problems = [str(each) for each in caught.value.problems or [caught.value]]
    assert all(any(text in each for text in refused) for each in problems), problems
    assert all(any(text in each for each in problems) for text in refused), problems


def test_what_is_not_on_this_machine_is_told():
    report = describe_run(lambda: parse_command_line(words_of("gpt-345m")))
    assert "tokenizer_type = GPT2BPETokenizer  (--vocab-file and --merge-file are given)" in report
    assert "unpadded_vocab_size = 50257" in report
    absent = report.split("not on this machine, and needed by the run:")[1]
    assert "my-gpt2_text_document.idx" in absent and "--vocab-file" in absent
    assert "planned with 50257 ids, the size of GPT-2; --vocab-size sets another number" in absent


@pytest.mark.parametrize("script", ["pretrain_mamba.py", "pretrain_hybrid.py"])
def test_scripts_of_state_space_models_plan_their_lines(script, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", [script, *words_of("mamba-hybrid")])
    monkeypatch.syspath_prepend(str(REPOSITORY))
    runpy.run_path(str(REPOSITORY / script), run_name="__main__")
    assert "state-space dual, layers 1, 3, 5, 7" in capsys.readouterr().out


@pytest.mark.parametrize("base", ["small", "experts"])
def test_drawn_lines_can_be_planned(base):
    """Thousands of them, and every two parts together, by `python -m tests.parity.recipe_lines`."""
    rng = random.Random(3)
    found = [refusals_of(words_of_line(base, *draw_line(base, rng))) for _ in range(40)]
    own = [refusals for refusals in found if not all(map(is_shared, refusals))]
    assert own == []
    assert sum(not refusals for refusals in found) / len(found) > 0.9


def test_a_checkpoint_of_another_machine_is_told():
    """Planning needs no checkpoint; starting does."""
    flags = "--pretrained-checkpoint /models/one --ckpt-step 7 --exit-on-missing-checkpoint"
    words = [*words_of("small-resume"), *flags.split()]
    absent = describe_run(lambda: parse_command_line(words)).split("needed by the run:")[1]
    assert "/results/checkpoints has no checkpoint of iteration 7" in absent
