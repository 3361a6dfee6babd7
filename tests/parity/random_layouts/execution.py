"""Run a case on the ranks of the harness and join what they report."""

import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

from tests.harness.distributed import DistributedFailure, run_distributed
from tests.parity.random_layouts.cases import Case
from tests.parity.random_layouts.corpus import write_all
from tests.parity.random_layouts.figures import figures_of_log, figures_of_scalars
from tests.parity.random_layouts.job import RankOutcome, run_rank
from tests.parity.random_layouts.outcomes import Kind, Result
from tests.parity.random_layouts.runner import TIMEOUT_S
from tests.parity.random_layouts.settings import number, to_words
from tests.parity.random_layouts.training import BASE, BEGUN, SCRATCH
from tests.parity.training_case import assemble


class _NoBaseError(Exception):
    """The model below the adapters was not trained; its `result` is that of the case."""

    def __init__(self, result: Result) -> None:
        super().__init__(result.text)
        self.result = result


class Execution:
    """Files of a series of runs, below one folder."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._corpora = write_all(folder)
        self._bases: dict[str, Path] = {}

    def run(self, case: Case) -> Result:
        """Run one command line to its end, or to its refusal."""
        try:
            outcomes: list[RankOutcome] = self.run_ranks(case, run_rank)
        except _NoBaseError as error:
            return error.result
        except DistributedFailure as error:
            return Result(Kind.BROKEN, _what_failed(error))
        refusal = next((o for o in outcomes if o.refusal), None)
        if refusal is not None:
            kind = Kind.REFUSED if all(o.is_helpful for o in outcomes) else Kind.UNHELPFUL
            return Result(kind, refusal.refusal)
        last = outcomes[-1]
        reports = [o.report for o in outcomes if o.report is not None]
        try:
            whole = assemble(reports, vocabulary=number(case.settings, "vocab-size"))
        except AssertionError as error:
            return Result(Kind.BROKEN, f"AssertionError: {error}")
        figures = [*figures_of_scalars(last.scalars), *figures_of_log(last.log)]
        return Result(Kind.EQUAL, figures=figures, weights=whole.weights)

    def run_ranks(self, case: Case, body: Callable[..., Any], *args: object) -> list[Any]:
        """Return what `body(groups, *args, words, metrics)` returns, by rank; see `job.run_rank`.

        Raises:
            DistributedFailure: a rank raised, died or hung.
        """
        words, scratch = to_words(case.settings), self._folder / "scratch"
        places = {**self._corpora, SCRATCH: str(scratch)}
        for word, before in ((BASE, base_of), (BEGUN, begun)):
            if word in words:
                places[word] = str(self._checkpoint_of(before(case)))
        shutil.rmtree(scratch, ignore_errors=True)
        scratch.mkdir()
        words = [places.get(word, word) for word in words]
        metrics = str(scratch / "metrics.jsonl")
        return run_distributed(body, case.ranks, *args, words, metrics, timeout_s=TIMEOUT_S)

    def _checkpoint_of(self, base: Case) -> Path:
        """Return the checkpoint at the end of a case."""
        place = self._bases.setdefault(str(base), self._folder / f"base-{len(self._bases)}")
        if not place.is_dir():
            result = self.run(replace(base, settings={**base.settings, "save": str(place)}))
            if result.kind is not Kind.EQUAL:
                raise _NoBaseError(result)
        return place


def begun(case: Case) -> Case:
    """Return the case in one process, which ends after its first step."""
    return case.serial.with_value("exit-interval", 1)


def base_of(case: Case) -> Case:
    """Return the case that trains, for one step in one process, what adapters are put beside."""
    names = [n for n in case.settings if n.startswith("lora")]
    names += ["pretrained-checkpoint", "use-dora"]
    names += ["load", "iterations-to-skip", "eval-interval", "lr-warmup-iters", "rampup-batch-size"]
    return case.serial.without(*names).with_value("train-iters", 1).with_value("eval-iters", 0)


def _what_failed(error: DistributedFailure) -> str:
    """Return the traceback of the rank that failed first, after where the others hang, if it does;
    the last line says what happened."""
    failed = sorted((o for o in error.outcomes if o.failed), key=lambda o: o.failed_at)
    shown = failed if failed[0].error_type == "Hang" else failed[:1]
    return "\n".join(
        f"rank {o.rank} of {len(error.outcomes)}:\n"
        + (o.trace.rstrip() or f"{o.error_type}: {o.error_message}")
        for o in reversed(shown)
    )
