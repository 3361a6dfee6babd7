"""A dry run refuses what a run refuses before its first step: `python -m tests.parity.dry_run`.

Draws command lines of `pretrain_gpt.py`, half of them with planted mistakes. Each is planned by
`--dry-run`, and started on ranks up to the place where the first step would begin. Exits with
status 1 if one is accepted and the other is refused, or if they name other problems.
"""

import functools
import pickle
import shutil
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from unittest import mock

from megatron.core import parallel_state
from megatron.core.enums import ModelType
from megatron.core.foundation.errors import MegatronError, MissingCheckpointError, MissingInputError
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.settings.command_line import read_command_line
from megatron.training import training
from megatron.training.cli.dry_run import describe_run
from megatron.training.cli.parser import parse_command_line
from pretrain_gpt import datasets_provider, forward_step, model_provider
from tests.harness.distributed import DistributedFailure, run_distributed
from tests.parity.mistakes import draw_commands, words_of, write_inputs
from tests.parity.random_layouts.cases import Case
from tests.parity.training_run import train_with_flags

CALL = training.PretrainCall.of(
    (datasets_provider, model_provider, ModelType.encoder_or_decoder, forward_step), {}
)
TIMEOUT_S = 120.0
ABSENT = "not on this machine: "


def planned(words: list[str], num_ranks: int) -> tuple[str, list[MegatronError]]:
    """Return the report of a dry run, and its problems."""
    words = ["--dry-run", "--dry-run-world-size", str(num_ranks), *words]
    try:
        return describe_run(functools.cache(lambda: parse_command_line(words)), CALL), []
    except MegatronError as error:
        return "", list(error.problems or (error,))


def start(groups: ProcessGroupCollection, words: list[str]) -> list[str]:
    """Do what a run does before its first step; return what each problem has found.

    Inputs that are not on this machine are marked.
    """
    parallel_state.destroy_model_parallel()
    with mock.patch.object(training, "train"):
        try:
            train_with_flags(groups, words)
        except MegatronError as error:
            return [
                ABSENT * isinstance(each, (MissingInputError, MissingCheckpointError)) + each.found
                for each in error.problems or (error,)
            ]
    return []


def started(words: list[str], num_ranks: int) -> list[str]:
    """Return the problems of a run on ranks of the harness."""
    try:
        per_rank = run_distributed(start, num_ranks, words, timeout_s=TIMEOUT_S)
    except DistributedFailure as error:
        # A rank that has found a problem leaves; its peers lose the connection to it.
        per_rank = [pickle.loads(o.result) for o in error.outcomes if o.result]
        if found := list(dict.fromkeys(found for rank in per_rank for found in rank)):
            return found
        failed = sorted((o for o in error.outcomes if o.failed), key=lambda o: o.failed_at)
        return [f"{failed[0].error_type}: {failed[0].error_message}"]
    return list(dict.fromkeys(found for rank in per_rank for found in rank))


@dataclass(frozen=True)
class Verdict:
    """What a dry run and a run said of one command line."""

    case: Case
    dry: tuple[str, ...]
    run: tuple[str, ...]
    report: str
    seconds: float
    """Of the dry run."""

    @property
    def agrees(self) -> bool:
        """Whether both accept, or both refuse and the dry run has the problems of the run."""
        others = {found for found in self.run if not found.startswith(ABSENT)}
        if self.dry:
            return bool(others) and others <= set(self.dry)
        told = self.report.partition("needed by the run:")[2]
        return not others and all(f"  {found.removeprefix(ABSENT)}" in told for found in self.run)

    def __str__(self) -> str:
        return f"{self.case.command()}\n  dry run: {self.dry}\n  run:     {self.run}"


def judged(case: Case, folder: Path) -> Verdict:
    """Return the verdict on a command line, whose files are made in a new folder."""
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    words = words_of(case, write_inputs(folder))
    begin = time.monotonic()
    try:
        report, problems = planned(words, case.ranks)
        dry = tuple(each.found for each in problems)
    except Exception as error:
        report, dry = "", (f"{type(error).__name__}: {error}",)
    seconds = time.monotonic() - begin
    return Verdict(case, dry, tuple(started(words, case.ranks)), report, seconds)


@dataclass(frozen=True, kw_only=True)
class Flags:
    """What the command line says."""

    cases: int = 40
    seed: int = 1
    first: int = 0
    """Number of the first case."""


def main() -> int:
    """Judge command lines; print disagreements."""
    flags = read_command_line(Flags, prog="python -m tests.parity.dry_run", description=__doc__)
    wrong, refused, seconds = 0, 0, 0.0
    with tempfile.TemporaryDirectory(prefix="dry-run-") as folder:
        for index, case in enumerate(draw_commands(flags.seed, flags.first + flags.cases)):
            if index < flags.first:
                continue
            verdict = judged(case, Path(folder, "case"))
            refused += bool(verdict.dry)
            seconds += verdict.seconds
            if not verdict.agrees:
                wrong += 1
                print(f"DISAGREEMENT, case {index}\n{verdict}", flush=True)
    print(
        f"{flags.cases} command lines: {refused} refused by both or either, {wrong} disagreements;"
        f" {seconds / flags.cases:.2f} s for a dry run"
    )
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
