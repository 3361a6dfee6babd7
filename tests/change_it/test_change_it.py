"""Each change of docs/change_it.md fits the code, runs, and does what the page says."""

import compileall
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.change_it.page import REPOSITORY, Change, apply, copy_tree, read_changes
from tests.harness.tolerances import EXACT, FP32_REORDERED_SUM, Tolerance, assert_close
from tests.harness.worker import ENVIRONMENT
from tests.parity.training_run import read_metrics

CHANGES = read_changes()
CHECKS = REPOSITORY / "tests" / "change_it" / "checks.py"


class Server:
    """The process that commands are forked from."""

    def __init__(self) -> None:
        environment = {**os.environ, **ENVIRONMENT}
        for name in ("PYTHONPATH", "PYTHONDONTWRITEBYTECODE"):
            environment.pop(name, None)
        self.process = subprocess.Popen(
            [sys.executable, str(CHECKS.with_name("server.py"))], env=environment, text=True,
            stdin=subprocess.PIPE, stdout=subprocess.PIPE,
        )  # fmt: skip

    def run(self, words: list[str], copy: Path) -> tuple[int, str]:
        """Return the exit status and what was printed."""
        log = copy / "log"
        log.write_text("")
        job = {"directory": str(copy), "words": words, "log": str(log),
               "path": [str(copy), str(REPOSITORY)]}  # fmt: skip
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.process.stdin.write(json.dumps(job) + "\n")
        self.process.stdin.flush()
        return int(self.process.stdout.readline()), log.read_text()


class Copy:
    """A copy of the package with one change."""

    def __init__(self, title: str, directory: Path, server: Server, original: Path) -> None:
        self.change: Change = CHANGES[title]
        self.directory, self.server = directory, server
        copy_tree(directory, original)
        apply(self.change.diff, directory)

    def run(self, words: list[str], *more: str) -> str:
        """Run a command, which must end well, and return what it printed."""
        code, printed = self.server.run([*words, *more], self.directory)
        assert code == 0, f"{' '.join([*words, *more])}\n{printed[-6000:]}"
        return printed

    def refused(self, words: list[str], *more: str) -> str:
        """Run a command that must not end well, and return what it printed."""
        code, printed = self.server.run([*words, *more], self.directory)
        assert code != 0, printed[-6000:]
        return printed

    def check(self, *arguments: str) -> None:
        """Run one of `checks.py` on the changed package."""
        self.run(["python", str(CHECKS), *arguments])

    def losses(self, words: list[str], *more: str) -> list[float]:
        """Run a training command and return the exact loss of each step."""
        metrics = self.directory / "metrics.jsonl"
        metrics.unlink(missing_ok=True)
        self.printed = self.run(words, *more, "--metrics-jsonl", str(metrics))
        return [line["lm loss"] for line in read_metrics(metrics)]


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    started = Server()
    with started.process:
        yield started
        started.process.stdin.close()


@pytest.fixture(scope="module")
def original(tmp_path_factory) -> Path:
    """The package as it is, compiled once for all copies."""
    directory = tmp_path_factory.mktemp("original")
    copy_tree(directory)
    compileall.compile_dir(directory, quiet=2)
    return directory


@pytest.fixture
def changed(server, original, tmp_path):
    return lambda title: Copy(title, tmp_path / "copy", server, original)


def without(words: list[str], *names: str, launcher: bool = False) -> list[str]:
    """Leave out flags with their value; with `launcher`, torchrun as well."""
    kept, skips = [], False
    for word, after in zip(words, [*words[1:], "--"], strict=True):
        if not skips and word not in names:
            kept.append(word)
        skips = word in names and not after.startswith("--")
    return ["python", *kept[3:]] if launcher and kept[0] == "torchrun" else kept


def assert_same_losses(found: list[float], expected: list[float], tolerance: Tolerance) -> None:
    assert len(found) == len(expected) > 1
    assert_close(found, expected, tolerance, "losses")


PARALLEL = ("--tensor-model-parallel-size", "--sequence-parallel", "--use-distributed-optimizer")


def test_a_norm_trains_under_sequence_parallelism_as_in_one_process(changed):
    copy = changed("A new norm")
    (command,) = copy.change.commands
    losses = copy.losses(command)
    assert "DynamicTanh tanh" in copy.printed
    alone = without(command, *PARALLEL, launcher=True)
    assert_same_losses(losses, copy.losses(alone), FP32_REORDERED_SUM)
    other = copy.losses(without(alone, "--normalization"))
    assert abs(losses[-1] - other[-1]) > 1e-3


def test_an_attention_kernel_is_chosen_and_gives_what_the_plain_one_gives(changed):
    copy = changed("A new attention kernel")
    train, dry_run = copy.change.commands
    losses = copy.losses(train)
    assert "attention windowed;" in copy.printed
    plain = copy.losses(train, "--attention-backend", "unfused")
    assert "attention unfused;" in copy.printed
    assert_same_losses(losses, plain, FP32_REORDERED_SUM)
    assert "attention: windowed" in copy.run(dry_run)
    copy.check("kernel")


def test_a_schedule_gives_the_losses_of_1f1b(changed):
    copy = changed("A new pipeline schedule")
    train, plot = copy.change.commands
    expected = copy.losses(without(train, "--pipeline-schedule"))
    assert_same_losses(copy.losses(train), expected, EXACT)
    assert "plan: breadth-first, p=2, v=2, m=4" in copy.run(plot)
    copy.check("schedule")


def test_a_flag_changes_the_value_and_is_refused_when_bad(changed):
    copy = changed("A new flag")
    (command,) = copy.change.commands
    assert copy.losses(command) != copy.losses(without(command, "--mlp-multiplier"))
    message = copy.refused(command, "--mlp-multiplier", "0")
    assert "mlp_multiplier=0.0" in message
    assert "flags: --mlp-multiplier" in message
    copy.check("flag")


def test_an_optimizer_with_sharded_state_trains_as_in_one_process(changed):
    copy = changed("A new optimizer")
    (command,) = copy.change.commands
    losses = copy.losses(command)
    words = without(command, *PARALLEL, launcher=True)
    alone = copy.losses(words)
    assert_same_losses(losses, alone, FP32_REORDERED_SUM)
    assert_same_losses(copy.losses(words, "--use-precision-aware-optimizer"), alone, EXACT)
    assert abs(alone[-1] - copy.losses(without(words, "--optimizer"))[-1]) > 1e-3
    copy.check("optimizer")


def test_a_family_is_read_trained_in_parallel_and_written(changed):
    copy = changed("A new model family")
    (command,) = copy.change.commands
    copy.check("make_model", command[command.index("--load-hf") + 1])
    printed = copy.run(command)
    assert "(helium)" in printed
    copy.check("family", *(command[command.index(f) + 1] for f in ("--load-hf", "--save-hf")))


def test_a_checkpoint_format_goes_out_and_comes_back_to_the_bit(changed):
    copy = changed("A new checkpoint format")
    train, export, resume = copy.change.commands
    copy.run(train)
    assert "wrote files/iter_0000004" in copy.run(export)
    copy.check("checkpoint_format", "native", "files")
    losses = copy.losses(resume)
    assert "successfully loaded checkpoint from files" in copy.printed
    native = ["native" if word == "files" else word for word in resume]
    assert_same_losses(losses, copy.losses(native), EXACT)
