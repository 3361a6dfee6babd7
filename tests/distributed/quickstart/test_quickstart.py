"""The quickstart from text to sampled text, on the fixtures and for a few steps."""

import json
import os
import sys
from pathlib import Path

import pytest

from tests.harness.started import run_python


def run_quickstart(output: Path) -> str:
    flags = f"--texts tests/fixtures/text --output {output} --train-iters 8".split()
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
    return run_python("examples/quickstart/quickstart.py", *flags, PATH=path)


@pytest.fixture(scope="module")
def first_run(tmp_path_factory):
    output = tmp_path_factory.mktemp("quickstart")
    return output, run_quickstart(output)


def test_it_trains_evaluates_draws_and_samples(first_run):
    output, shown = first_run
    assert "tensor 2 x pipeline 2" in shown
    assert "held-out loss" in shown and "guessing by frequency" in shown
    assert (output / "loss.png").stat().st_size > 10_000
    assert "To be, or not to be" in (output / "samples.txt").read_text()
    assert (output / "checkpoints" / "latest_checkpointed_iteration.txt").read_text() == "8"


def test_a_second_run_finds_everything_done(first_run):
    output, _ = first_run
    log = (output / "train.log").read_text()
    assert "Done already" in run_quickstart(output)
    assert (output / "train.log").read_text() == log


def test_held_out_text_is_not_trained_on(first_run):
    output, _ = first_run
    titles = [
        [json.loads(line)["title"] for line in (output / "data" / name).read_text().splitlines()]
        for name in ("train.jsonl", "valid.jsonl")
    ]
    assert titles == [["sonnets"], ["macbeth"]]
